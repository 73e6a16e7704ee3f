"""BranchNorm, Figure 1, and its claim C36, on made-up losses and scores."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_memory import remembered
from judged import SEEDS, SPREAD, Loss, by_depth, flat, models, verdict
from making import load, make_run

from stabilitylab.reports.base import MissingRuns, Panel, Picture
from stabilitylab.reports.collection import Record, Runs
from stabilitylab.reports.figures.branchnorm_1 import GapToPostLN


def drawn(*records: Sequence[Record]) -> tuple[list[Panel], Picture]:
    picture = GapToPostLN().picture(Runs(itertools.chain(*records)))
    return [*picture.panels], picture


def test_the_gap_is_deepnorms_loss_minus_postlns_seed_by_seed() -> None:
    deepnorm = models("deepnorm", lambda n, s: 5 + 0.01 * n + s, depths=(6, 12, 18), seeds=(3, 4))
    postln = models("postln", lambda n, s: 5 + (0.02 if s == 4 else -0.02) + s, depths=(6, 12, 18), seeds=(3, 4, 5))
    (quality, gap), picture = drawn(deepnorm, postln)
    assert [(line.arch, line.x, line.seeds) for line in quality.series] == [
        ("postln", [6, 12, 18], 3),
        ("deepnorm", [6, 12, 18], 2),
    ]
    assert quality.series[1].y == pytest.approx([8.56, 8.62, 8.68])
    (line,) = gap.series
    assert (line.x, line.y) == ([6, 12, 18], pytest.approx([0.06, 0.12, 0.18]))  # the seed's own level cancels
    assert (line.low, line.high) == (pytest.approx([0.04, 0.10, 0.16]), pytest.approx([0.08, 0.14, 0.20]))
    assert [(one.value, one.label) for one in gap.references] == [(0.0, "equal")]
    assert (gap.y, gap.ticks) == ("gap to Post-LN [nats/token]", [6, 12, 18])
    assert picture.finding == (
        "DeepNorm's gap to Post-LN is +0.060 at 6, +0.120 at 12, +0.180 at 18 layers a side [nats/token] (2 seeds); "
        "with each layer it changes by +0.0100 [+0.0100, +0.0100] (2 seeds)."
    )
    assert any("stands in for BLEU" in note for note in picture.notes)


def test_where_one_of_them_failed_there_is_a_cross_and_no_gap() -> None:
    deepnorm = models("deepnorm", by_depth(0.01), depths=(6, 18))
    stuck = models("postln", lambda n, s: 6.5, depths=(18,), verdict="stuck", seeds=SEEDS[:3])
    lost = models("postln", lambda n, s: math.nan, depths=(18,), verdict="diverged", seeds=SEEDS[3:])
    (quality, gap), picture = drawn(deepnorm, models("postln", flat, depths=(6,)), stuck, lost)
    line, crosses = (one for one in quality.series if one.arch == "postln")
    assert (line.x, line.y) == ([6], [5.0])
    assert (crosses.kind, crosses.label, crosses.seeds) == ("crosses", "Post-LN: diverged or stuck", 4)
    assert [*zip(crosses.x, crosses.y, strict=True)] == [(18, 6.5)] * 4  # the diverged one at the worst value drawn
    assert gap.series[0].x == [6]
    assert "Post-LN diverged or is stuck in 4 of 4 at 18 layers a side." in picture.notes
    assert picture.finding.endswith("at 6 layers a side [nats/token] (4 seeds); one depth cannot show that it grows.")


def test_growth_is_measured_on_seeds_that_have_all_depths() -> None:
    deepnorm = models("deepnorm", by_depth(0.01), depths=(6, 18), seeds=(3, 4))
    shallow, deep = models("postln", flat, seeds=(3, 4)), models("postln", flat, depths=(18,), seeds=(4,))
    _, picture = drawn(deepnorm, shallow, deep)
    assert picture.finding.endswith("(2 seeds); with each layer it changes by +0.0100 (one seed).")
    _, picture = drawn(deepnorm, models("postln", flat, seeds=(3,)), deep)
    assert picture.finding.endswith("no seed has all depths, so its growth is not measured.")
    assert verdict("C36", deepnorm, models("postln", flat, seeds=(3,)), deep).verdict == "inconclusive"


def test_where_no_pair_trained_the_levels_are_drawn_alone() -> None:
    (quality,), picture = drawn(models("deepnorm", flat), models("postln", lambda n, s: 6.5, verdict="stuck"))
    assert [one.kind for one in quality.series] == ["crosses", "line"]
    assert picture.finding == "At no depth did DeepNorm and Post-LN both train, so there is no gap to measure."


def test_with_bleu_the_gap_is_what_deepnorm_lacks(tmp_path: Path) -> None:
    for arch, depth in itertools.product(("postln", "deepnorm"), (2, 6)):
        metrics = {"held_out_nll": [8.0, 5.0], "held_out_accuracy": [0.1, 0.2]}
        path = make_run(tmp_path, f"{arch}-{depth}", arch=arch, layers=depth, metrics=metrics, metric_steps=(0, 100))
        found = {"bleu": 30.0 + depth - (depth / 10 if arch == "deepnorm" else 0), "row": 100}
        (path / "evaluation.json").write_text(json.dumps(found))
    picture = GapToPostLN().picture(load(tmp_path))
    quality, gap = picture.panels
    assert (quality.y, gap.y) == ("BLEU", "gap to Post-LN [BLEU]")
    assert gap.series[0].y == pytest.approx([0.2, 0.6])
    assert "+0.200 at 2, +0.600 at 6 layers a side [BLEU] (one seed)" in picture.finding
    assert not any("stands in" in note for note in picture.notes)


def test_gaps_at_several_depths_come_before_a_longer_training_at_one() -> None:
    long: dict[str, Any] = {"settings": {"train": {"steps": 999}}}
    sweep = [*models("deepnorm", by_depth(0.01), depths=(6, 12)), *models("postln", flat, depths=(6, 12))]
    once = [*models("deepnorm", by_depth(-0.01), **long), *models("postln", flat, **long)]
    (_, gap), picture = drawn(sweep, once)
    assert gap.series[0].x == [6, 12]
    assert any("Not drawn: 8 runs" in note for note in picture.notes)
    found = verdict("C36", sweep, once)
    assert (found.verdict, len(found.effects)) == ("reproduced", 3)


def test_without_one_of_them_it_names_the_command() -> None:
    alone = [remembered("a", arch="deepnorm"), remembered("b", arch="postln", layers=12, settings={"train": {"lr": 1}})]
    with pytest.raises(MissingRuns) as missing:
        GapToPostLN().picture(Runs(alone))
    assert missing.value.command == "stabilitylab sweep branchnorm:1 --scale tiny"


@pytest.mark.parametrize(
    ("deepnorm", "depths", "expected"),
    [
        (by_depth(0.01), (6, 12, 18), "reproduced"),
        (by_depth(-0.01), (6, 12, 18), "contradicted"),
        (by_depth(-0.01, 1.0), (6, 12, 18), "contradicted"),  # under-trained, but less so with depth
        (lambda n, s: 5.0 + 20 * SPREAD[s], (6, 12, 18), "inconclusive"),
        (by_depth(0.01), (6,), "inconclusive"),  # one depth cannot show that the gap grows ...
        (by_depth(-0.01), (6,), "contradicted"),  # ... but it can show that there is none
    ],
)
def test_c36_undertrained_deepnorm(deepnorm: Loss, depths: Sequence[int], expected: str) -> None:
    found = verdict("C36", models("deepnorm", deepnorm, depths=depths), models("postln", flat, depths=depths))
    assert found.verdict == expected
    assert len(found.effects) == len(depths) + 1


def test_c36_numbers() -> None:
    found = verdict("C36", models("deepnorm", by_depth(0.01), depths=(6, 18)), models("postln", flat, depths=(6, 18)))
    assert [effect["mean"] for effect in found.effects] == pytest.approx([0.06, 0.18, 0.01])


def test_c36_is_about_runs_that_converge() -> None:
    stuck = models("postln", flat, depths=(6, 12), verdict="stuck")
    found = verdict("C36", models("deepnorm", by_depth(0.01), depths=(6, 12)), stuck)
    assert found.verdict == "not testable"
    assert found.command == "stabilitylab sweep branchnorm:1 --scale tiny"
