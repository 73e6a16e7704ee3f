"""BranchNorm, Figure 8, its claims C41 and C42, and what it shares with others, on made-up similarities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import remembered
from making import Made, layer_rows, load, make_run, sublayer_rows
from rest_slow import slow

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Runs
from stabilitylab.reports.figures.branchnorm.figure_8 import AdjacentSimilarity
from stabilitylab.reports.measures.comparison import comparable, matched, one_ramp
from stabilitylab.schema import Row

SEEDS = (3, 4, 5)
STEPS = (0, 10, 250)
RAMP = 10  # 4 % of 250 updates
Cosine = Callable[[int, Row], float]  # of a step and a layer


def make_similarity(
    folder: Path,
    arch: str,
    seed: int,
    cosine: Cosine,
    *,
    layers: int = 3,
    steps: Sequence[int] = STEPS,
    beta: Cosine | None = None,
    gradient: Cosine = lambda step, row: 0.1 * row.layer,
    settings: dict[str, Any] | None = None,
    **facts: Any,
) -> None:
    """``beta``: beta_ii^2 of the sub-layers of a layer, whose branches have variances that differ by a factor of 10."""
    tables = {
        "cosine_similarity": Made(
            layer_rows(layers), ("raw", "centred"), lambda step, row: (cosine(step, row), -1.0), steps, "mean"
        ),
        "grad_norm": Made(layer_rows(layers), ("value",), gradient, steps[:-1] or steps),
    }
    if beta is not None:

        def variances(step: int, row: Row) -> Sequence[float]:
            branch = 10.0 if row.sublayer == "ffn" else 1.0
            return branch / beta(step, row), branch

        tables["branch_variance"] = Made(sublayer_rows(layers), ("total", "branch"), variances, steps, "mean")
    own = {"model": {"T": RAMP}, "train": {"steps": max(*steps, 1)}, **(settings or {})}
    metrics = {
        "held_out_nll": [8.0 - step / 100 - seed / 100 for step in steps],
        "held_out_accuracy": [0.1] * len(steps),
    }
    make_run(folder, f"{arch}-{seed}", arch=arch, seed=seed, layers=layers, settings=own, tables=tables,
             metrics=metrics, metric_steps=steps, **facts)  # fmt: skip


def make_pairs(
    folder: Path, difference: Callable[[int, int, Row], float], seeds: Sequence[int] = SEEDS, **more: Any
) -> None:
    """DeepNorm at .9 minus layer / 100, less ``difference`` (of seed, step and layer) in BranchNorm."""
    for seed in seeds:
        for arch in ("deepnorm", "branchnorm"):

            def cosine(step: int, row: Row, arch: str = arch, seed: int = seed) -> float:
                return 0.9 - row.layer / 100 - (difference(seed, step, row) if arch == "branchnorm" else 0.0)

            make_similarity(folder, arch, seed, cosine, **more)


def drawn(folder: Path) -> tuple[dict[str, Panel], Picture]:
    picture = AdjacentSimilarity().picture(load(folder))
    return {panel.title: panel for panel in [*picture.panels, *picture.controls][::-1]}, picture


def one(folder: Path, id: str) -> Finding:
    return judge(CLAIMS[id], load(folder))


def test_the_picture_is_the_similarity_of_layers_from_the_second_on(tmp_path: Path) -> None:
    make_pairs(
        tmp_path, lambda seed, step, row: 0.02 if (row.stack, row.layer) != ("decoder", 3) else -0.01 * (seed - 2)
    )
    panels, picture = drawn(tmp_path)
    assert [panel.title for panel in picture.panels] == ["Encoder", "Decoder"]
    aside = ["Encoder", "Decoder", "Held-out loss", "Gradient, encoder, last probed step"]
    assert [panel.title for panel in picture.controls] == aside
    assert panels["Encoder"].limits == panels["Decoder"].limits is not None
    deepnorm, branchnorm = panels["Decoder"].series
    assert (deepnorm.x, deepnorm.y) == ([2, 3], pytest.approx([0.12, 0.13]))  # 1 - cos
    assert branchnorm.y == pytest.approx([0.14, 0.11])  # the row of layer 1, with the embedding, is not drawn
    assert (branchnorm.low, branchnorm.high) == (pytest.approx([0.14, 0.10]), pytest.approx([0.14, 0.12]))
    assert panels["Encoder"].series[1].y == pytest.approx([0.14, 0.15])
    loss = panels["Held-out loss"].series[0]
    assert (loss.x, loss.y) == ([0, 10, 250], pytest.approx([7.96, 7.86, 5.46]))
    gradient = panels["Gradient, encoder, last probed step"]
    assert gradient.log_y
    assert gradient.series[0].y == pytest.approx([0.1, 0.2, 0.3])
    assert picture.finding == (
        "DeepNorm's adjacent layers are more alike than BranchNorm's in 3 of 4 pairs "
        "(median difference +0.020, 3 seeds)."
    )


def test_one_interrupted_run_is_drawn(tmp_path: Path) -> None:
    make_similarity(tmp_path, "preln", 3, lambda step, row: 0.5, steps=(0,), state="interrupted", verdict="")
    panels, picture = drawn(tmp_path)
    assert panels["Encoder"].series[0].y == [0.5, 0.5]
    assert picture.finding == "Median cosine of adjacent layers: Pre-LN 0.500 (one seed)."
    assert "The run did not end." in picture.notes


def test_a_run_that_diverged_is_drawn_and_not_compared(tmp_path: Path) -> None:
    make_pairs(tmp_path, lambda seed, step, row: 0.02)
    make_similarity(tmp_path, "branchnorm", 9, lambda step, row: math.nan, verdict="diverged", state="diverged")
    make_similarity(tmp_path, "deepnorm", 9, lambda step, row: 0.9)
    _, picture = drawn(tmp_path)
    assert picture.finding.endswith("in 4 of 4 pairs (median difference +0.020, 3 seeds).")
    assert "Of 8 runs 1 diverged." in picture.notes
    assert one(tmp_path, "C41").effects[0]["seeds"] == [3, 4, 5]


def test_what_is_not_a_number_is_not_compared(tmp_path: Path) -> None:
    unfinished = {"state": "interrupted", "verdict": ""}
    for seed in (3, 4):
        for arch, value in (("deepnorm", 0.9), ("branchnorm", math.nan if seed == 4 else 0.8)):
            make_similarity(tmp_path, arch, seed, lambda step, row, v=value: v, **unfinished)
    _, picture = drawn(tmp_path)
    assert picture.finding.endswith("in 4 of 4 pairs (median difference +0.100, one seed).")


def test_an_encoder_without_gradient_is_noted(tmp_path: Path) -> None:
    make_similarity(tmp_path, "branchnorm", 3, lambda step, row: 1.0, gradient=lambda step, row: 0.0)
    _, picture = drawn(tmp_path)
    assert any("Exactly 0" in note and "Gradient, encoder" in note for note in picture.notes)


def test_a_single_layer_has_no_pair(tmp_path: Path) -> None:
    make_similarity(tmp_path, "deepnorm", 3, lambda step, row: 0.9, layers=1)
    make_similarity(tmp_path, "branchnorm", 3, lambda step, row: 0.9, layers=1)
    panels, picture = drawn(tmp_path)
    assert "Encoder" not in panels
    assert "one layer a stack" in picture.finding
    assert {one(tmp_path, id).verdict for id in ("C41", "C42")} == {"not testable"}


def test_without_runs_it_names_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", layers=2)
    with pytest.raises(MissingRuns) as missing:
        AdjacentSimilarity().picture(load(tmp_path))
    assert "stabilitylab sweep branchnorm:8" in missing.value.command
    assert one(tmp_path, "C41").command == "stabilitylab sweep branchnorm:8 --scale tiny"


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (lambda seed, step, row: 0.01 + seed / 1000, "reproduced"),  # in all pairs, however little
        (lambda seed, step, row: -0.03 - seed / 1000, "contradicted"),
        # in 1 of 10 layers
        slow(lambda seed, step, row: 0.03 if row.layer == 2 else -0.03, "contradicted"),
        # in 6 of 10
        slow(lambda seed, step, row: 0.03 if row.layer < 8 else -0.03, "not reproduced"),
        slow(lambda seed, step, row: (seed - 4) / 10, "inconclusive"),
        # what counts is the end
        slow(lambda seed, step, row: 0.03 if step == 250 else -1.0, "reproduced"),
    ],
)
def test_c41_more_alike_after_training(
    tmp_path: Path, difference: Callable[[int, int, Row], float], verdict: str
) -> None:
    make_pairs(tmp_path, difference, range(3, 9), layers=11)
    found = one(tmp_path, "C41")
    assert found.verdict == verdict
    values = {seed: [difference(seed, 250, row) for row in layer_rows(11) if row.layer > 1] for seed in range(3, 9)}
    share, median = found.effects
    assert share["values"] == {str(seed): f"{sum(v > 0 for v in own)}/20" for seed, own in values.items()}
    assert median["mean"] == pytest.approx(np.mean([np.median(own) for own in values.values()]))


def test_c41_another_ramp_is_refused(tmp_path: Path) -> None:
    make_pairs(tmp_path, lambda seed, step, row: 0.03, settings={"model": {"T": 100}})
    found = one(tmp_path, "C41")
    assert found.verdict == "not testable"
    assert found.why.startswith("BranchNorm ramped for 100 of 250 updates")


@pytest.mark.parametrize(
    ("difference", "slope", "verdict"),
    [
        (lambda seed, step, row: 0.01, 1.0, "reproduced"),  # there at all times, and all of it beta's
        (lambda seed, step, row: -0.01 if step == 0 else 0.01, 1.0, "contradicted"),
        # described
        slow(lambda seed, step, row: -0.01 if step == RAMP else 0.01, 1.0, "reproduced"),
        # there at all times, and none of it beta's: described
        slow(lambda seed, step, row: 0.01, 0.0, "reproduced"),
        slow(lambda seed, step, row: 0.01 * (seed - 4), 1.0, "inconclusive"),
    ],
)
def test_c42_is_it_there_without_training(
    tmp_path: Path, difference: Callable[[int, int, Row], float], slope: float, verdict: str
) -> None:
    """The cosine falls by ``slope`` times beta_ii^2; what is left between the architectures is the rest."""
    left = 0.001 + (0.03 if slope == 0 else 0.0)
    for seed in SEEDS:
        for arch in ("deepnorm", "branchnorm"):

            def beta(step: int, row: Row, arch: str = arch) -> float:
                of_arch, of_stack = 0.02 if arch == "branchnorm" else 0.0, 0.04 if row.stack == "decoder" else 0.0
                return 0.05 + row.layer / 100 + of_arch * row.layer + of_stack

            def cosine(step: int, row: Row, arch: str = arch, seed: int = seed) -> float:
                if step < 250:
                    return 0.9 - (difference(seed, step, row) if arch == "branchnorm" else 0.0)
                stack = 0.03 if row.stack == "decoder" else 0.0
                return 0.9 + stack - slope * beta(step, row) + (left if arch == "deepnorm" else 0.0)

            make_similarity(tmp_path, arch, seed, cosine, layers=4, beta=beta)
    found = one(tmp_path, "C42")
    assert found.verdict == verdict
    start, end, equal = found.effects
    assert start["mean"] == pytest.approx(np.mean([difference(s, 0, layer_rows(2)[1]) for s in SEEDS]), abs=1e-12)
    assert end["mean"] == pytest.approx(np.mean([difference(s, RAMP, layer_rows(2)[1]) for s in SEEDS]), abs=1e-12)
    if slope:
        assert equal["mean"] == pytest.approx(left, abs=1e-9)
    assert (end["verdict"], equal["verdict"]) == ("", "")


def test_c42_without_variances_has_two_effects(tmp_path: Path) -> None:
    make_pairs(tmp_path, lambda seed, step, row: 0.02)
    found = one(tmp_path, "C42")
    assert (found.verdict, len(found.effects)) == ("reproduced", 2)


@pytest.mark.parametrize(("ramp", "effects"), [(4000, 1), (5, 0), (9, 2)])
def test_c42_prints_the_end_of_the_ramp_where_it_is_on_record(tmp_path: Path, ramp: int, effects: int) -> None:
    """A ramp that the run does not finish has none; 2 % of the run is another than the protocol's."""
    make_pairs(tmp_path, lambda seed, step, row: 0.03, settings={"model": {"T": ramp}})
    found = one(tmp_path, "C42")
    assert (found.verdict, len(found.effects)) == ("reproduced" if effects else "not testable", effects)


def test_two_ramps_are_no_seeds(tmp_path: Path) -> None:
    make_pairs(tmp_path / "a", lambda seed, step, row: 0.03)
    for seed in (3, 4):
        make_similarity(tmp_path / "b", "branchnorm", seed, lambda step, row: 0.0, settings={"model": {"T": 7}})
        make_similarity(tmp_path / "b", "deepnorm", seed, lambda step, row: 0.9 - row.layer / 100,
                        settings={"model": {"T": 7}})  # fmt: skip
    panels, picture = drawn(tmp_path)
    deepnorm, branchnorm = panels["Encoder"].series
    assert (branchnorm.y, branchnorm.seeds) == (pytest.approx([0.15, 0.16]), 3)
    assert deepnorm.seeds == 3  # T means nothing there: one run a seed
    assert "BranchNorm with T = 10; left out: T = 7." in picture.notes
    assert one(tmp_path, "C41").effects[0]["n"] == 3


def test_one_ramp_keeps_depths_apart() -> None:
    runs = Runs([remembered(f"{n}-{s}", layers=n, seed=s) for n in (2, 4) for s in SEEDS])
    kept, notes = one_ramp(runs, "model.encoder_layers")
    assert (len(kept), notes) == (6, [])
    (group,) = comparable(runs, "model.encoder_layers", "model.decoder_layers")
    assert len(group) == 6


def test_matched_prefers_longer_training_with_enough_seeds() -> None:
    def at(steps: int, seeds: Sequence[int], verdict: str = "trained") -> list[Any]:
        settings = {"train": {"steps": steps}}
        return [
            remembered(f"{a}-{steps}-{s}", arch=a, seed=s, settings=settings, verdict=verdict)
            for a in ("deepnorm", "branchnorm")
            for s in seeds
        ]

    records = [*at(100, range(3, 9)), *at(200, SEEDS), *at(300, SEEDS[:2]), *at(400, SEEDS, "stuck")]
    for record in records:
        record.tables = frozenset({"t"})
    found = matched(Runs(records), "deepnorm", "branchnorm", "t")
    assert [(seed, a.name, b.name) for seed, a, b in found] == [
        (seed, f"deepnorm-200-{seed}", f"branchnorm-200-{seed}") for seed in SEEDS
    ]


def test_an_early_end_does_not_bend_the_mean(tmp_path: Path) -> None:
    make_similarity(tmp_path, "deepnorm", 3, lambda step, row: 0.9)
    make_similarity(tmp_path, "deepnorm", 4, lambda step, row: 0.9, steps=(0, 10, 13),
                    settings={"train": {"steps": 250}}, state="diverged", verdict="diverged")  # fmt: skip
    panels, _ = drawn(tmp_path)
    assert panels["Held-out loss"].series[0].x == [0, 10, 250]


def test_what_has_not_ended_is_not_drawn_beside_what_has(tmp_path: Path) -> None:
    make_pairs(tmp_path, lambda seed, step, row: 0.02)
    make_similarity(tmp_path, "preln", 3, lambda step, row: 0.5, steps=(0, 10), settings={"train": {"steps": 250}},
                    state="interrupted", verdict="")  # fmt: skip
    panels, picture = drawn(tmp_path)
    assert {line.arch for line in panels["Encoder"].series} == {"deepnorm", "branchnorm"}
    assert "Not drawn: 1 run without an end." in picture.notes
