"""Claims on how well models train, and at which settings: C36 to C40."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from scipy import stats

from .. import style
from ..base import MissingRuns
from ..claims import Effect, Share, claim
from ..collection import LAYERS, Runs, pairs
from ..layerwise import ENOUGH, comparable, failed, last_nll
from ..statistics import Region, signed_rank, slope, t_interval
from .branchnorm_5 import even, share_of

LONGEST_RAMP = 0.2  # of the run: the paper's largest T
EQUIVALENT = 0.05  # nats: the margin of "insensitive to"
RECIPE = "lr=7e-4 warmup=300 steps=1200"  # of a grid: that of the runs of branchnorm:8
LONG = f"depth=12 seed=3..7 {RECIPE}"
Gaps = dict[int, dict[int, float]]  # depth -> seed -> final nll of one label minus that of another


def _gaps(runs: Runs, first: str, second: str) -> Gaps:
    """``first`` minus ``second`` at equal steps, of the comparable group that was trained longest, on the most data,
    with enough seeds. Pairs without a finite loss are left out."""
    found: list[tuple[tuple[float, ...], Gaps]] = []
    for group in comparable(runs.where(even, kind="train", label=(first, second)), *LAYERS):
        gaps: Gaps = {}
        for depth in group.depths:
            one, other = (group.where(lambda run, d=depth: run.depth == d, label=label) for label in (first, second))
            values = {seed: last_nll(a) - last_nll(b) for seed, a, b in pairs(one, other)}
            if values := {seed: value for seed, value in values.items() if math.isfinite(value)}:
                gaps[depth] = values
        if gaps:
            seeds = min(ENOUGH, max(map(len, gaps.values())))
            length = float(group[0].settings["train.steps"])
            found.append(((seeds, length, share_of(group[0]), len(gaps)), gaps))
    return max(found, key=lambda one: one[0])[1] if found else {}


@claim(
    "C36",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="DeepNorm is under-trained against Post-LN where both converge, and the gap grows with depth",
    source="BranchNorm, Fig. 1",
    statistic="final held-out nll, DeepNorm - Post-LN [nats], at each depth where both trained; its slope with depth",
    threshold="R: gap > 0 at every depth and slope > 0; X: gap < 0 at some depth, or slope < 0 (the plan names no X: "
    "ours)",
    sweep="branchnorm:8",
)
def undertrained_deepnorm(runs: Runs) -> list[Effect]:
    gaps = _gaps(runs.where(lambda run: not failed(run)), "deepnorm", "postln")
    if not gaps:
        raise MissingRuns(
            "needs deepnorm and postln that trained at several depths with the same seeds and settings",
            f"stabilitylab sweep --grid arch=postln,deepnorm depth=12,24,36 seed=3..7 {RECIPE}",
        )
    found = [
        Effect(f"gap at {depth}L", values, Region(low=0), Region(high=0), p=signed_rank([*values.values()]))
        for depth, values in gaps.items()
    ]
    if len(gaps) == 1:  # shows the gap, which may refute the claim, but not that it grows
        return [*found, Effect("slope of the gap (needs two depths)", {}, Region(low=0), Region(high=0))]
    seeds = sorted(set.intersection(*map(set, gaps.values())))
    slopes = {seed: slope([*gaps], [gaps[depth][seed] for depth in gaps]) for seed in seeds}
    return [*found, Effect("slope of the gap per layer", slopes, Region(low=0), Region(high=0))]


@claim(
    "C37",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="BranchNorm ends with a lower loss than DeepNorm at all depths",
    source="BranchNorm, Tables 1-3 and Fig. 4",
    statistic="final held-out nll, BranchNorm - DeepNorm [nats], at each depth; beside it the ablation T = 1",
    threshold="R: < -.01 at every depth; X: > .01 at some depth",
    sweep="branchnorm:8",
    pilot="+.24 and +.30 (6L, 400 steps); the ablation -.42",
)
def lower_final_loss(runs: Runs) -> list[Effect]:
    gaps = _gaps(runs, "branchnorm", "deepnorm")
    if not gaps:
        raise MissingRuns(
            "needs branchnorm and deepnorm with the same seeds and settings, and a finite loss at the end"
        )
    ablation = _gaps(runs, "branchnorm T=1", "deepnorm")
    return [
        Effect(
            f"difference at {depth}L{_beside(ablation.get(depth, {}))}", values, Region(high=-0.01), Region(low=0.01),
            p=signed_rank([*values.values()]),
        )
        for depth, values in gaps.items()
    ]  # fmt: skip


def _beside(values: dict[int, float]) -> str:
    """The ablation in the name of an effect: it is printed and decides nothing."""
    found = t_interval(values.values())
    return f" (ablation T = 1: {found.mean:+.3f}, n = {found.n})" if values else ""


def _over(runs: Runs, setting: str, count: int, axes: str) -> list[Effect]:
    """Each two values of ``setting`` against each other: BranchNorm's final nll by seed, in the group with most seeds
    at all of ``count`` values or more. A run that diverged makes its comparisons undecided, not equal."""
    ramped = runs.where(
        lambda run: style.family(run.label) == "branchnorm" and run.label != "branchnorm T=1",
        kind="train", model__init="arch", model__alpha=None, model__decoder_arch=None, model__qk_gain=None,
    )  # fmt: skip
    best: dict[Any, dict[int, float]] = {}
    for group in ramped.groups(setting):
        others = ("model.T", "model.growth")
        split = {tuple(run.settings[key] for key in others if key != setting): None for run in group}
        for fixed in split:
            values: dict[Any, dict[int, float]] = {}
            for run in group:
                if tuple(run.settings[key] for key in others if key != setting) == fixed:
                    values.setdefault(run.settings[setting], {})[run.seed] = last_nll(run)
            often = sorted(values, key=lambda value: -len(values[value]))
            for most in range(count, len(often) + 1):  # a value that few seeds have must not take the others' seeds
                some = {value: values[value] for value in often[:most]}
                if len(_shared(some.values())) >= max(1, len(_shared(best.values()))):
                    best = some
    if not best:
        raise MissingRuns(
            f"needs branchnorm runs that differ in {setting} alone, at {count} values such as those of the paper "
            "scaled to the length of the runs, with the same seeds",
            f"stabilitylab sweep --grid arch=branchnorm {axes} {LONG}",
        )
    seeds = _shared(best.values())
    found = []
    for one, other in itertools.combinations(sorted(best), 2):
        gap = {seed: best[other][seed] - best[one][seed] for seed in seeds}
        above = sum(gap.values()) > 0
        outside = Region(low=EQUIVALENT) if above else Region(high=-EQUIVALENT)
        name = f"{setting.partition('.')[2]} = {other} minus {one}"
        found.append(Effect(name, gap, Region(-EQUIVALENT, EQUIVALENT), outside, p=signed_rank([*gap.values()])))
    return found


def _shared(values: Iterable[dict[int, float]]) -> list[int]:
    """Seeds that all have."""
    sets = [set(by_seed) for by_seed in values]
    return sorted(set.intersection(*sets)) if sets else []


@claim(
    "C38",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="The result is insensitive to T in {100, 400, 4000, 20000}",
    source="BranchNorm, Sec. 5.1",
    statistic="final held-out nll at one T minus that at another, for each two of four T or more [nats]; T up to a "
    "fifth of the run, as the paper's 20000 of 100000 (this limit was chosen after runs beyond it had been seen)",
    threshold="R: within .05 of 0 for every two (equivalence); X: beyond .05 for some two",
    sweep="branchnorm:8",
)
def insensitive_to_t(runs: Runs) -> list[Effect]:
    within = runs.where(lambda run: run.settings["model.T"] <= LONGEST_RAMP * run.settings["train.steps"], kind="train")
    return _over(within, "model.T", 4, "T=2,5,48,240")


@claim(
    "C39",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="The shape of alpha's schedule does not matter",
    source="BranchNorm, Fig. 7",
    statistic="final held-out nll with one shape minus that with another, for each two of linear, exp and sigmoid",
    threshold="R: within .05 nats of 0 for every two (equivalence); X: beyond .05 for some two",
    sweep="branchnorm:8",
)
def insensitive_to_shape(runs: Runs) -> list[Effect]:
    return _over(runs, "model.growth", 3, "T=240 model.growth=linear,exp,sigmoid")


@claim(
    "C40",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="BranchNorm needs no warm-up and tolerates larger learning rates than DeepNorm",
    source="BranchNorm, Fig. 6",
    statistic="share of runs that diverged or are stuck over warm-up {0, 100, 1000, 4000} x lr {5, 8, 10, 15}e-4; "
    "of the runs in which the two differ, the share where DeepNorm failed",
    threshold="R: at most 1/16 of BranchNorm's, more than half of the differing ones DeepNorm's; X: more than 1/16, "
    "or less than half (the plan names no X: ours)",
    sweep="branchnorm:8",
)
def no_warmup_needed(runs: Runs) -> list[Effect | Share]:
    axes = ("train.warmup", "train.lr")
    best: dict[tuple[object, ...], dict[str, bool]] = {}
    for group in comparable(runs.where(kind="train", label=("branchnorm", "deepnorm")), *axes):
        cells: dict[tuple[object, ...], dict[str, bool]] = {}
        for run in group.where(lambda run: run.verdict != ""):
            cells.setdefault((*(run.settings[axis] for axis in axes), run.seed), {})[run.label] = failed(run)
        both = {key: cell for key, cell in cells.items() if len(cell) == 2}
        warmups, rates = ({key[place] for key in both} for place in (0, 1))
        whole = {key[:2] for key in both} == {*itertools.product(warmups, rates)}
        if whole and min(len(warmups), len(rates)) >= 4 and len(both) > len(best):
            best = both
    if not best:
        raise MissingRuns(
            "needs branchnorm and deepnorm on a grid of four warm-ups and four learning rates",
            "stabilitylab sweep --grid arch=branchnorm,deepnorm warmup=0,100,1000,4000 lr=5e-4,8e-4,1e-3,1.5e-3 "
            "depth=24 seed=3..7 steps=1200",
        )
    differing = [cell for cell in best.values() if cell["branchnorm"] != cell["deepnorm"]]
    lost = sum(cell["branchnorm"] for cell in best.values())
    worse = sum(cell["deepnorm"] for cell in differing)
    p = float(stats.binomtest(worse, len(differing)).pvalue) if differing else math.nan  # McNemar's test, exact
    return [
        Share("BranchNorm's runs that failed", lost, len(best), Region(high=1 / 16 + 1e-9), Region(low=1 / 16)),
        Share("of differing runs, DeepNorm failed", worse, len(differing), Region(low=0.5), Region(high=0.5), p=p),
    ]
