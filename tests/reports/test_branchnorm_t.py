"""BranchNorm's T, and its claim C38, on made-up ramps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from in_memory import remembered
from judged import SEEDS, SPREAD, Loss, flat, models, verdict

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.branchnorm.t import LengthOfRamp


def run(T: int, seed: int, nll: float, *, lr: float = 7e-4, **more: Any) -> Record:
    settings = {"model": {"T": T, **more.pop("model", {})}, "train": {"steps": 1000, "lr": lr}}
    return remembered(f"{T}-{lr}-{seed}-{more}", seed=seed, nll=nll, settings=settings, **more)


def drawn(*records: Record) -> tuple[list[Panel], Picture]:
    picture = LengthOfRamp().picture(Runs(records))
    return [*picture.panels], picture


def test_the_picture_is_the_final_loss_against_t_at_each_learning_rate() -> None:
    gain = {2: 0.0, 40: 0.03, 200: 0.02}
    runs = [run(T, seed, 5 + seed + gain[T] * factor, lr=lr)
            for lr, factor in ((7e-4, 1), (2.1e-3, -3)) for T in gain for seed in (3, 4)]  # fmt: skip
    (ends, margin), picture = drawn(*runs)
    assert [(line.label, line.x, line.seeds) for line in ends.series] == [
        ("lr 0.0007", [2, 40, 200], 2),
        ("lr 0.0021", [2, 40, 200], 2),
    ]
    assert ends.series[0].y == pytest.approx([8.5, 8.53, 8.52])
    assert (ends.series[0].low, ends.series[0].high) == (pytest.approx([8, 8.03, 8.02]), pytest.approx([9, 9.03, 9.02]))
    looks = {(line.colour, line.dash, line.marker) for line in ends.series}
    assert len(looks) == 2
    assert (ends.log_x, ends.ticks, ends.references) == (True, [2, 40, 200], [])
    assert margin.series[0].y == pytest.approx([0, 0.03, 0.02])  # against T = 2; the seeds' levels cancel
    assert margin.series[1].y == pytest.approx([0, -0.09, -0.06])
    assert sorted(line.value for line in margin.references) == [-0.05, 0, 0.05]
    assert picture.finding == (
        "At lr 0.0007 T from 2 to 200 moves the final loss by at most +0.030 [+0.030, +0.030] nats (T = 40 against 2, "
        "2 seeds); at lr 0.0021 T from 2 to 200 moves the final loss by at most -0.090 [-0.090, -0.090] nats (T = 40 "
        "against 2, 2 seeds). The margin of equivalence is 0.05 nats."
    )


def test_all_rates_are_compared_with_one_ramp() -> None:
    low = [run(T, 3, 5 + T / 1000, lr=7e-4) for T in (2, 40, 200)]
    high = [run(T, 3, 6 + T / 100, lr=2.1e-3) for T in (40, 200)]  # the shortest is not there, or was lost
    (_, margin), picture = drawn(*low, *high)
    assert margin.series[0].y == pytest.approx([-0.038, 0, 0.16])
    assert margin.series[1].y == pytest.approx([0, 1.6])
    assert picture.finding.count("against 40") == 2


def test_no_ramp_at_all_is_drawn_and_not_the_reference_and_a_fifth_of_the_run_is_marked() -> None:
    (ends, margin), picture = drawn(*(run(T, 3, 5 + T / 1000) for T in (1, 40, 600)))
    assert ends.series[0].x == [1, 40, 600]
    assert [(line.value, line.vertical) for line in ends.references] == [(200, True)]
    assert margin.series[0].y == pytest.approx([-0.039, 0, 0.56])
    assert "(T = 600 against 40, one seed)" in picture.finding


def test_a_ramp_on_which_the_model_was_lost_is_a_cross() -> None:
    (ends, margin), picture = drawn(
        run(2, 3, 6.5, verdict="stuck"), run(2, 4, math.nan, verdict="diverged"), run(40, 3, 5.0), run(200, 3, 5.1)
    )
    line, crosses = ends.series
    assert (line.x, crosses.kind) == ([40, 200], "crosses")
    assert [*zip(crosses.x, crosses.y, strict=True)] == [(2, 6.5), (2, 6.5)]
    assert crosses.colour == line.colour
    assert margin.series[0].x == [40, 200]
    assert any("1 diverged, 1 got stuck at or above the unigram baseline" in note for note in picture.notes)


def test_learning_rates_with_one_ramp_are_left_out() -> None:
    one = [run(40, seed, 4.0, lr=1e-2) for seed in (3, 4, 5, 6)]
    (ends, _), picture = drawn(run(2, 3, 5.0), run(40, 3, 5.0), *one)
    assert [line.label for line in ends.series] == ["lr 0.0007"]
    assert "Not drawn: 4 runs of BranchNorm with other settings." in picture.notes


def test_other_shapes_and_controls_are_no_ramps_of_this_kind() -> None:
    others = [run(9, 3, 1.0, model={"growth": "exp"}), run(9, 3, 1.0, model={"init": "xavier"}),
              run(9, 3, 1.0, model={"alpha": 0.5}), run(9, 3, 1.0, arch="deepnorm")]  # fmt: skip
    (ends, _), _ = drawn(run(2, 3, 5.0), run(40, 3, 5.0), *others)
    assert ends.series[0].x == [2, 40]
    with pytest.raises(MissingRuns) as missing:
        drawn(run(2, 3, 5.0), *others)
    assert missing.value.command == "stabilitylab sweep branchnorm:T --scale tiny"


def test_where_all_failed_nothing_is_compared() -> None:
    (ends,), picture = drawn(*(run(T, 3, 6.5, verdict="stuck") for T in (2, 40)))
    assert [line.kind for line in ends.series] == ["crosses"]
    assert picture.finding.startswith("At lr 0.0007 no two ramps trained with the same seeds (2 of 2 runs failed).")


def ramps(losses: Mapping[int, Loss], **more: Any) -> list[Record]:
    return [r for T, loss in losses.items() for r in models("branchnorm", loss, settings=ramp(T), **more)]


def ramp(T: int, **model: Any) -> dict[str, Any]:
    return {"model": {"T": T, **model}, "train": {"steps": 10_000}}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (lambda n, s: 5.01 + SPREAD[s], "reproduced"),
        (lambda n, s: 5.2 + SPREAD[s], "contradicted"),
        (lambda n, s: 4.8 + SPREAD[s], "contradicted"),
        (lambda n, s: 5.05 + SPREAD[s], "inconclusive"),
        (lambda n, s: math.inf if s == 3 else 5.0, "inconclusive"),
    ],
)
def test_c38_insensitive_to_t(last: Loss, expected: str) -> None:
    found = verdict("C38", ramps({2: flat, 40: flat, 400: flat, 2000: last}))
    assert found.verdict == expected
    assert len(found.effects) == 6  # every two of four


def test_c38_a_run_that_diverged_is_not_equal() -> None:
    lost = models("branchnorm", flat, settings=ramp(2000), seeds=SEEDS[:1], verdict="diverged")
    rest = models("branchnorm", flat, settings=ramp(2000), seeds=SEEDS[1:])
    assert verdict("C38", ramps({2: flat, 40: flat, 400: flat}), lost, rest).verdict == "inconclusive"


def test_c38_a_value_with_few_seeds_does_not_take_the_others() -> None:
    few = models("branchnorm", flat, settings=ramp(9), seeds=(3,))
    found = verdict("C38", ramps({2: flat, 40: flat, 400: flat, 2000: flat}), few)
    assert (found.verdict, found.effects[0]["n"], len(found.effects)) == ("reproduced", 4, 6)


def test_c38_needs_four_ramps_and_no_others() -> None:
    three = ramps({2: flat, 40: flat, 400: flat})
    ablation = models("branchnorm", flat, settings=ramp(1))
    exponential = models("branchnorm", flat, settings=ramp(9, growth="exp"))
    xavier = models("branchnorm", flat, settings=ramp(9, init="xavier"))
    half = models("branchnorm", flat, settings=ramp(5000))  # longer than any of the paper's
    found = verdict("C38", three, ablation, exponential, xavier, half)
    assert found.verdict == "not testable"
    assert found.command == "stabilitylab sweep branchnorm:T --scale tiny"


def test_c38_judges_every_learning_rate_with_four_ramps() -> None:
    def fast(T: int) -> list[Record]:
        settings = {"model": {"T": T}, "train": {"lr": 1e-2, "steps": 10_000}}
        return models("branchnorm", lambda n, s: 5 + T + SPREAD[s], seeds=SEEDS[:3], settings=settings)

    slow = ramps({2: flat, 40: flat, 400: flat, 2000: flat})
    three = [record for T in (2, 40, 400) for record in fast(T)]
    found = verdict("C38", slow, three)
    assert (found.verdict, {effect["n"] for effect in found.effects}) == ("reproduced", {4})
    found = verdict("C38", slow, three, fast(2000))  # the lowest rate decides, the other is printed
    assert (found.verdict, len(found.effects)) == ("reproduced", 12)
    assert found.effects[0]["effect"] == "T = 2000 minus 2 at lr 0.0003"
    assert found.effects[-1]["effect"] == "T = 2000 minus 400 at lr 0.01"
    assert {effect["verdict"] for effect in found.effects[1:]} == {""}


def test_c38_is_about_the_longest_and_the_shortest_ramp() -> None:
    """Those between may lie apart: they are printed."""
    found = verdict("C38", ramps({2: flat, 40: lambda n, s: 6.0 + SPREAD[s], 400: flat, 2000: flat}))
    assert found.verdict == "reproduced"
    assert max(effect["mean"] for effect in found.effects) == pytest.approx(1)


def test_c38_plateaus_are_not_equal_and_do_not_take_the_place_of_a_longer_training() -> None:
    stuck = [r for T in (2, 4, 8, 16) for r in models("branchnorm", flat, verdict="stuck",
             settings={"model": {"T": T}, "train": {"steps": 100}})]  # fmt: skip
    assert verdict("C38", stuck).verdict == "inconclusive"
    apart = ramps({T: (lambda n, s, T=T: 5 + T / 100 + SPREAD[s]) for T in (2, 40, 400, 2000)})
    assert verdict("C38", apart, stuck).verdict == "contradicted"
