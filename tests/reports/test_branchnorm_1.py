"""BranchNorm, Figure 1, and its claim C36, on made-up losses and scores."""

from __future__ import annotations

import itertools
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
from stabilitylab.reports.figures.branchnorm.figure_1 import GapToPostLN
from stabilitylab.store.evaluation import write_evaluation


def drawn(*records: Sequence[Record]) -> tuple[list[Panel], Picture]:
    picture = GapToPostLN().picture(Runs(itertools.chain(*records)))
    return [*picture.panels], picture


def converged(arch: str, loss: Loss, **more: Any) -> list[Record]:
    """Those whose loss falls by .009 nats over the last fifth of the updates."""
    return models(arch, loss, falls=0.009, **more)


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
    parts = [converged("deepnorm", by_depth(0.01), depths=(6, 18), seeds=(3, 4)), converged("postln", flat, seeds=(3,))]
    found = verdict("C36", *parts, converged("postln", flat, depths=(18,), seeds=(4,)))
    assert (found.verdict, found.effects[0]["n"], len(found.effects)) == ("inconclusive", 0, 3)


def test_where_no_pair_trained_the_levels_are_drawn_alone() -> None:
    (quality,), picture = drawn(models("deepnorm", flat), models("postln", lambda n, s: 6.5, verdict="stuck"))
    assert [one.kind for one in quality.series] == ["crosses", "line"]
    assert picture.finding == "At no depth did DeepNorm and Post-LN both train, so there is no gap to measure."


def test_with_bleu_the_gap_is_what_deepnorm_lacks(tmp_path: Path) -> None:
    for arch, depth in itertools.product(("postln", "deepnorm"), (2, 6)):
        metrics = {"held_out_nll": [8.0, 5.0], "held_out_accuracy": [0.1, 0.2]}
        path = make_run(tmp_path, f"{arch}-{depth}", arch=arch, layers=depth, metrics=metrics, metric_steps=(0, 100))
        found = {"bleu": 30.0 + depth - (depth / 10 if arch == "deepnorm" else 0), "row": 100}
        write_evaluation(path, found)
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
    both = [converged("deepnorm", by_depth(0.01), depths=(6, 12)), converged("postln", flat, depths=(6, 12))]
    found = verdict("C36", *both, converged("deepnorm", by_depth(-0.01), **long), converged("postln", flat, **long))
    assert (found.verdict, len(found.effects)) == ("reproduced", 4)


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
        (by_depth(-0.01, 1.0), (6, 12, 18), "reproduced"),  # under-trained; that it is so less with depth is described
        (lambda n, s: 5.0 + 20 * SPREAD[s], (6, 12, 18), "inconclusive"),
        (by_depth(0.01), (6,), "reproduced"),
    ],
)
def test_c36_undertrained_deepnorm(deepnorm: Loss, depths: Sequence[int], expected: str) -> None:
    found = verdict("C36", converged("deepnorm", deepnorm, depths=depths), converged("postln", flat, depths=depths))
    assert found.verdict == expected
    assert len(found.effects) == 1 + len(depths) + (len(depths) > 1)


def test_c36_numbers() -> None:
    found = verdict(
        "C36", converged("deepnorm", by_depth(0.01), depths=(6, 18)), converged("postln", flat, depths=(6, 18))
    )
    assert [effect["effect"] for effect in found.effects] == [
        f"{name}, fairseq's gain"
        for name in ("mean gap over depths", "gap at 6L", "gap at 18L", "slope of the gap per layer")
    ]
    assert [effect["mean"] for effect in found.effects] == pytest.approx([0.12, 0.06, 0.18, 0.01])
    assert "6L-6L / 18L-18L" in found.effects[0]["conditions"]
    assert found.effects[0]["limits"].startswith("converged")
    assert "18L" not in found.effects[1]["conditions"]


def test_c36_deepnets_own_postln_decides_and_fairseqs_describes() -> None:
    own = converged("postln", lambda n, s: 5.5, settings={"model": {"init": "xavier-1"}})
    found = verdict("C36", converged("deepnorm", by_depth(0.01)), own, converged("postln", flat))
    assert [(e["effect"], e["role"], e["mean"]) for e in found.effects] == [
        ("mean gap over depths, gain 1", "primary", pytest.approx(-0.44)),
        ("gap at 6L, gain 1", "descriptive", pytest.approx(-0.44)),
        ("mean gap over depths, fairseq's gain", "descriptive", pytest.approx(0.06)),
        ("gap at 6L, fairseq's gain", "descriptive", pytest.approx(0.06)),
    ]
    assert found.verdict == "contradicted"
    assert found.effects[2]["reproduced"] is None


@pytest.mark.parametrize("falls", [0.011, 0.4])
def test_c36_is_about_runs_that_converge(falls: float) -> None:
    still = models("postln", flat, falls=falls)
    found = verdict("C36", converged("deepnorm", by_depth(0.01)), still)
    assert found.verdict == "not testable"
    assert f"still fell by 0.009 to {falls:.2g} nats (converged: less than 0.01)" in found.why
    stuck = converged("postln", flat, depths=(6, 12), verdict="stuck")
    found = verdict("C36", converged("deepnorm", by_depth(0.01), depths=(6, 12)), stuck)
    assert found.verdict == "not testable"
    assert found.command == "stabilitylab sweep branchnorm:1 --scale tiny"


def test_each_arm_with_a_rate_of_its_own_is_drawn_and_compared() -> None:
    slow, fast = ({"train": {"lr": lr}} for lr in (5e-4, 2e-3))
    deepnorm = [converged("deepnorm", by_depth(0.01), depths=(n,), settings=s) for n, s in ((6, slow), (18, fast))]
    postln = [converged("postln", flat, depths=(n,), settings=s) for n, s in ((6, fast), (18, fast))]
    (_, gap), _ = drawn(*deepnorm, *postln)
    assert gap.series[0].x == [6, 18]
    found = verdict("C36", *deepnorm, *postln)
    assert found.effects[0]["mean"] == pytest.approx(0.12)
    assert "lr 0.002 (Post-LN), 0.0005 / 0.002 (DeepNorm)" in found.effects[0]["conditions"]
