"""BranchNorm, Figure 7, and its claim C39, on made-up ramps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from in_memory import remembered
from judged import SEEDS, SPREAD, Loss, flat, models, verdict

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.branchnorm.figure_7 import GrowthStrategies

COURSE = {"linear": (0.0, 0.5, 1.0, 1.0, 1.0), "exp": (0.0, 0.8, 1.0, 1.0, 1.0), "sigmoid": (0.0, 0.4, 1.0, 1.0, 1.0)}


def run(shape: str, seed: int, end: float, *, T: int = 2, **more: Any) -> Record:
    """Five rows; alpha at each, the held-out loss at the first, third and last."""
    metrics = {
        "alpha": [*COURSE[shape][:4], np.nan],  # none in the row after training
        "held_out_nll": [8.0, np.nan, 6.0, np.nan, end],
        "held_out_accuracy": [0.1, np.nan, 0.2, np.nan, 0.3],
    }
    settings = {"model": {"growth": shape, "T": T}, "train": {"steps": 4}}
    return remembered(f"{shape}-{T}-{seed}", seed=seed, settings=settings, metrics=metrics, **more)


def drawn(*records: Record) -> tuple[dict[str, Panel], Picture]:
    picture = GrowthStrategies().picture(Runs(records))
    return {panel.title: panel for panel in picture.panels}, picture


def test_the_picture_is_alpha_the_loss_and_the_difference_to_linear_growth() -> None:
    ends = {"linear": 5.0, "exp": 5.01, "sigmoid": 4.97}
    panels, picture = drawn(*(run(name, seed, end + seed) for name, end in ends.items() for seed in (3, 4)))
    alpha, loss, margin = panels.values()
    assert [*panels] == ["Growth of alpha", "Held-out loss", "Against linear growth"]
    for line, name in zip(alpha.series, COURSE, strict=True):
        assert (line.label, line.x, line.y) == (f"{name} growth", [0, 1, 2, 3], [*COURSE[name][:4]])
    assert len({line.dash for line in alpha.series}) == 3
    assert [(line.x, line.y) for line in loss.series] == [
        ([0, 2, 4], pytest.approx([8, 6, end + 3.5])) for end in ends.values()
    ]
    assert len({line.marker for line in alpha.series}) == 3  # they have one colour
    assert [line.marker for line in margin.series] == [line.marker for line in alpha.series[1:]]
    assert [(line.kind, line.x) for line in margin.series] == [("points", [3, 4])] * 2
    assert [line.y for line in margin.series] == [pytest.approx([0.01, 0.01]), pytest.approx([-0.03, -0.03])]
    assert sorted(line.value for line in margin.references) == [-0.05, 0, 0.05]
    assert picture.finding == (
        "Exp growth ends +0.010 [+0.010, +0.010] nats from linear (2 seeds); sigmoid growth ends -0.030 "
        "[-0.030, -0.030] nats from linear (2 seeds); the margin of equivalence is 0.05."
    )


def test_only_ramps_of_one_length_are_compared() -> None:
    """Linear runs of another T stand beside them, and more of them."""
    own = [run(name, 3, 5.0) for name in COURSE]
    others = [run("linear", seed, 9.0, T=3) for seed in (3, 4, 5, 6, 7)]
    panels, picture = drawn(*own, *others)
    assert panels["Held-out loss"].series[0].y[-1] == 5.0
    assert panels["Held-out loss"].series[0].seeds == 1
    assert picture.notes[0].endswith("T = 2. Lines are means over seeds, bands their range.")
    assert "Not drawn: 5 runs of BranchNorm with other settings or another T." in picture.notes


def test_alpha_is_drawn_up_to_twice_the_ramp() -> None:
    long = {"alpha": [0.0, 0.5] + [1.0] * 8, "held_out_nll": [8.0] * 10, "held_out_accuracy": [0.1] * 10}
    both = [
        remembered(name, settings={"model": {"growth": name, "T": 2}}, metrics=long) for name in ("linear", "sigmoid")
    ]
    panels, _ = drawn(*both)
    assert panels["Growth of alpha"].series[0].x == [0, 1, 2, 3, 4]
    assert panels["Held-out loss"].series[0].x == [*range(10)]


def test_a_shape_that_failed_is_a_cross_and_no_difference() -> None:
    panels, picture = drawn(run("linear", 3, 5.0), run("exp", 3, 6.5, verdict="stuck"))
    (cross,) = panels["Against linear growth"].series
    assert (cross.label, cross.kind, cross.x, cross.y) == ("exp growth, diverged or stuck", "crosses", [3], [1.5])
    assert picture.finding == ("No shape trained beside linear growth at one seed: 1 of 2 runs diverged or are stuck.")
    some = run("linear", 4, 5.0), run("exp", 4, 5.01)
    _, picture = drawn(run("linear", 3, 5.0), run("exp", 3, 6.5, verdict="stuck"), *some)
    assert picture.finding == (
        "Exp growth ends +0.010 nats from linear (one seed); with exp growth 1 of 2 diverged or are stuck; "
        "the margin of equivalence is 0.05."
    )


def test_one_shape_is_no_comparison() -> None:
    with pytest.raises(MissingRuns) as missing:
        drawn(run("linear", 3, 5.0), run("exp", 3, 5.0, T=3))
    assert missing.value.command == "stabilitylab sweep branchnorm:7 --scale tiny"


def shapes(exponential: Loss, names: Sequence[str] = ("linear", "exp", "sigmoid"), T: int = 100) -> list[Record]:
    return [
        record
        for name in names
        for record in models(
            "branchnorm", exponential if name == "exp" else flat, settings={"model": {"growth": name, "T": T}}
        )
    ]


@pytest.mark.parametrize(
    ("exponential", "expected"),
    [
        (lambda n, s: 5.01 + SPREAD[s], "reproduced"),
        (lambda n, s: 5.2 + SPREAD[s], "contradicted"),
        (lambda n, s: 4.8 + SPREAD[s], "contradicted"),
        (lambda n, s: 5.05 + SPREAD[s], "inconclusive"),
    ],
)
def test_c39_shape_of_the_schedule(exponential: Loss, expected: str) -> None:
    # another T stands beside it, without all shapes
    found = verdict("C39", shapes(flat, ("linear", "exp"), T=50), shapes(exponential))
    assert found.verdict == expected
    assert [e["effect"] for e in found.effects] == [
        "growth = exp minus linear",
        "growth = sigmoid minus exp",
        "growth = sigmoid minus linear",
    ]
    assert found.effects[0]["mean"] == pytest.approx(np.mean([exponential(6, s) for s in SEEDS]) - 5)


def test_c39_the_other_pairs_describe() -> None:
    def sigmoid(n: int, s: int) -> float:
        return 6.0 + SPREAD[s]

    models_ = [*shapes(flat, ("linear", "exp")), *models(
        "branchnorm", sigmoid, settings={"model": {"growth": "sigmoid", "T": 100}})]  # fmt: skip
    found = verdict("C39", models_)
    assert (found.verdict, found.effects[1]["mean"], found.effects[1]["verdict"]) == (
        "reproduced",
        pytest.approx(1),
        "",
    )


def test_c39_without_sigmoid() -> None:
    found = verdict("C39", shapes(flat, ("linear", "exp")))
    assert found.verdict == "not testable"
    assert found.command == "stabilitylab sweep branchnorm:7 --scale tiny"
