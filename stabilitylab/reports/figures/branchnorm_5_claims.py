"""Claims on how well and at which settings models train: C36 to C40, C45 and C46."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from .. import style
from ..base import MissingRuns
from ..claims import Effect, Share, claim
from ..collection import LAYERS, Runs, pairs
from ..layerwise import last_nll
from ..statistics import Region, signed_rank, slope
from .branchnorm_5 import failed

EQUIVALENT = 0.05  # nats: the margin of "insensitive to"
SHOWN = Region()  # an effect that is printed and decides nothing


def _gaps(runs: Runs, first: str, second: str, *free: str) -> dict[int, dict[int, float]]:
    """Depth -> seed -> final held-out nll of ``first`` minus ``second``, at equal steps, both having trained."""
    found: dict[int, dict[int, float]] = {}
    trained = runs.where(lambda run: not failed(run), kind="train", label=(first, second))
    for group in trained.groups(*LAYERS, *free):
        by_depth = {
            depth: {
                seed: last_nll(a) - last_nll(b)
                for seed, a, b in pairs(
                    group.where(label=first, layers=(depth, depth)), group.where(label=second, layers=(depth, depth))
                )
            }
            for depth in group.depths
        }
        by_depth = {depth: values for depth, values in by_depth.items() if values}
        if _size(by_depth) > _size(found):
            found = by_depth
    return found


def _size(by_depth: dict[int, dict[int, float]]) -> int:
    return sum(map(len, by_depth.values()))


def _slopes(by_depth: dict[int, dict[int, float]]) -> dict[int, float]:
    """Seed -> slope of the value against depth, over seeds that all depths have."""
    seeds = set.intersection(*(set(values) for values in by_depth.values()))
    return {seed: slope([*by_depth], [by_depth[depth][seed] for depth in by_depth]) for seed in sorted(seeds)}


@claim(
    "C36",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="DeepNorm is under-trained against Post-LN where both converge, and the gap grows with depth",
    source="BranchNorm, Fig. 1",
    statistic="final held-out nll, DeepNorm - Post-LN [nats], at each depth; its slope with depth",
    threshold="R: gap > 0 at every depth and slope > 0; X: gap < 0 at some depth (the plan names no X: ours)",
    sweep="branchnorm:8",
)
def undertrained_deepnorm(runs: Runs) -> list[Effect]:
    gaps = _gaps(runs, "deepnorm", "postln")
    if not gaps:
        raise MissingRuns("needs deepnorm and postln trained with the same seeds and settings")
    found = [
        Effect(f"gap at {depth}L-{depth}L", values, Region(low=0), Region(high=0), p=signed_rank([*values.values()]))
        for depth, values in gaps.items()
    ]
    if len(gaps) > 1:
        return [*found, Effect("slope of the gap per layer", _slopes(gaps), Region(low=0), Region(high=0))]
    # one depth shows the gap, but not that it grows
    return [*found, Effect("slope of the gap per layer (needs two depths)", {}, Region(low=0))]


@claim(
    "C37",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="BranchNorm ends with a lower loss than DeepNorm at all depths",
    source="BranchNorm, Tables 1-3 and Fig. 4",
    statistic="final held-out nll, BranchNorm - DeepNorm [nats], at each depth; printed beside it the ablation T = 1",
    threshold="R: < -.01 at every depth; X: > .01 at some depth",
    sweep="branchnorm:8",
    pilot="+.24 and +.30 (6L, 400 steps); the ablation -.42",
)
def lower_final_loss(runs: Runs) -> list[Effect]:
    gaps, ablation = _gaps(runs, "branchnorm", "deepnorm"), _gaps(runs, "branchnorm T=1", "deepnorm")
    if not gaps:
        raise MissingRuns("needs branchnorm and deepnorm trained with the same seeds and settings")
    found = [
        Effect(
            f"BranchNorm - DeepNorm at {depth}L-{depth}L", values, Region(high=-0.01), Region(low=0.01),
            p=signed_rank([*values.values()]),
        )
        for depth, values in gaps.items()
    ]  # fmt: skip
    return found + [
        Effect(f"(ablation) T = 1 - DeepNorm at {depth}L-{depth}L", values, SHOWN) for depth, values in ablation.items()
    ]


LONG = "depth=12 seed=3..7 lr=7e-4 warmup=300 steps=1200"  # of a grid: what the runs of branchnorm:8 are


def _range_over(runs: Runs, setting: str, least: Sequence[object], axes: str) -> dict[int, float]:
    """Seed -> largest minus smallest final nll of BranchNorm over values of ``setting``, of which ``least`` are had."""
    scheduled = runs.where(lambda run: style.family(run.label) == "branchnorm" and run.label != "branchnorm T=1")
    best: dict[int, float] = {}
    for group in scheduled.where(kind="train", model__alpha=None).groups(setting):
        if setting != "model.T" and len({run.settings["model.T"] for run in group}) > 1:
            continue
        seen: dict[int, dict[object, float]] = {}
        for record in group:
            seen.setdefault(record.seed, {})[record.settings[setting]] = last_nll(record)
        ranges = {
            seed: max(values.values()) - min(values.values())
            for seed, values in seen.items()
            if len(values) >= len(least)
        }
        best = max(best, ranges, key=len)
    if not best:
        raise MissingRuns(
            f"needs branchnorm runs that differ in {setting} alone, at {len(least)} values such as those of the paper "
            "scaled to the length of the runs",
            f"stabilitylab sweep --grid arch=branchnorm {axes} {LONG}",
        )
    return best


@claim(
    "C38",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="The result is insensitive to T in {100, 400, 4000, 20000}",
    source="BranchNorm, Sec. 5.1",
    statistic="range of the final held-out nll over four values of T, at each seed [nats]",
    threshold="R: < .05 (equivalence margin); X: > .05",
    sweep="branchnorm:8",
)
def insensitive_to_t(runs: Runs) -> list[Effect]:
    values = _range_over(runs, "model.T", (100, 400, 4000, 20000), "T=2,5,48,240")
    return [Effect("range over T", values, Region(high=EQUIVALENT), Region(low=EQUIVALENT))]


@claim(
    "C39",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="The shape of alpha's schedule does not matter",
    source="BranchNorm, Fig. 7",
    statistic="range of the final held-out nll over linear, exp and sigmoid, at each seed [nats]",
    threshold="R: < .05 (equivalence margin); X: > .05",
    sweep="branchnorm:8",
)
def insensitive_to_shape(runs: Runs) -> list[Effect]:
    values = _range_over(runs, "model.growth", ("linear", "exp", "sigmoid"), "T=240 model.growth=linear,exp,sigmoid")
    return [Effect("range over shapes", values, Region(high=EQUIVALENT), Region(low=EQUIVALENT))]


@claim(
    "C40",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="BranchNorm needs no warm-up and tolerates larger learning rates than DeepNorm",
    source="BranchNorm, Fig. 6",
    statistic="share of runs that diverged or are stuck over warm-up {0, 100, 1000, 4000} x lr {5, 8, 10, 15}e-4; "
    "of the cells in which the two differ, the share where DeepNorm failed",
    threshold="R: at most 1/16 of BranchNorm's, more than half of the differing cells DeepNorm's; X: more than 1/16",
    sweep="branchnorm:8",
)
def no_warmup_needed(runs: Runs) -> list[Effect | Share]:
    axes = ("train.warmup", "train.lr")
    groups = runs.where(kind="train", label=("branchnorm", "deepnorm")).groups(*axes)
    cells: dict[tuple[object, ...], dict[str, bool]] = {}
    for group in groups[:1]:
        for run in group:
            key = (*(run.settings[axis] for axis in axes), run.seed)
            cells.setdefault(key, {})[run.label] = failed(run)
    both = {key: cell for key, cell in cells.items() if len(cell) == 2}
    if len({key[:2] for key in both}) < 16:
        raise MissingRuns(
            "needs branchnorm and deepnorm on a grid of four warm-ups and four learning rates",
            "stabilitylab sweep --grid arch=branchnorm,deepnorm train.warmup=0,100,1000,4000 "
            "train.lr=5e-4,8e-4,1e-3,1.5e-3 depth=24 seed=3..7",
        )
    differing = [cell for cell in both.values() if cell["branchnorm"] != cell["deepnorm"]]
    lost = sum(cell["branchnorm"] for cell in both.values())
    return [
        Share("BranchNorm's cells that failed", lost, len(both), Region(high=1 / 16 + 1e-9), Region(low=1 / 16)),
        Share("of differing cells, DeepNorm's", sum(c["deepnorm"] for c in differing), len(differing), Region(low=0.5)),
    ]


@claim(
    "C45",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="What depth gains depends on the amount of data: little data loses with depth",
    source="BranchNorm, Fig. 5",
    statistic="of quality = -nll: slope with log N on the smallest data; slope of those slopes with log data size",
    threshold="R: interaction > 0 and slope on the smallest data < 0; X: either of the other sign",
    sweep="branchnorm:5",
)
def depth_needs_data(runs: Runs) -> list[Effect]:
    groups = runs.where(lambda run: not failed(run), kind="train", label="branchnorm").groups(*LAYERS, "data.fraction")
    interaction: dict[int, float] = {}
    smallest: dict[int, float] = {}
    for group in groups:
        shares = sorted({run.settings["data.fraction"] for run in group})
        for seed in group.seeds:
            own = group.where(lambda run, seed=seed: run.seed == seed)
            slopes = {share: _depth_slope(own.where(data__fraction=share)) for share in shares}
            if len(slopes) > 1 and all(math.isfinite(value) for value in slopes.values()):
                interaction[seed] = slope([math.log(share) for share in slopes], [*slopes.values()])
                smallest[seed] = slopes[shares[0]]
        if interaction:
            break
    if not interaction:
        raise MissingRuns("needs branchnorm at two depths or more on two data sizes or more")
    return [
        Effect("interaction", interaction, Region(low=0), Region(high=0)),
        Effect("slope on the smallest data", smallest, Region(high=0), Region(low=0)),
    ]


def _depth_slope(runs: Runs) -> float:
    values = {run.depth: -last_nll(run) for run in runs}
    return slope([math.log(depth) for depth in values], [*values.values()]) if len(values) > 1 else math.nan


@claim(
    "C46",
    figure="branchnorm:5",
    paper="DeepNet",
    sentence="Quality grows with the logarithm of depth",
    source="DeepNet, Fig. 8",
    statistic="AIC of quality = A log d + B minus the best of it, a straight line and a saturating curve, at each seed",
    threshold="R: < 2; X: > 2",
    sweep="branchnorm:5",
)
def logarithmic_in_depth(runs: Runs) -> list[Effect]:
    best: dict[int, float] = {}
    for group in runs.where(lambda run: not failed(run), kind="train", label=("deepnorm",)).groups(*LAYERS):
        if len(group.depths) < 5:
            continue
        own = {seed: sorted((r.depth, -last_nll(r)) for r in group if r.seed == seed) for seed in group.seeds}
        best = {seed: _log_over_best(points) for seed, points in own.items() if len(points) >= 5}
    if not best:
        raise MissingRuns(
            "needs deepnorm at five depths or more",
            "stabilitylab sweep --grid arch=deepnorm depth=6,12,24,48,96 seed=3..7 train.steps=1200",
        )
    return [Effect("AIC of the logarithm above the best", best, Region(high=2), Region(low=2))]


def _log_over_best(points: Iterable[tuple[int, float]]) -> float:
    depth, quality = (np.array(values, float) for values in zip(*points, strict=True))
    shapes = {"log": np.log(depth), "linear": depth, "saturating": 1 - np.exp(-depth / depth.mean())}
    scores = {name: _aic(shape, quality) for name, shape in shapes.items()}
    return scores["log"] - min(scores.values())


def _aic(x: np.ndarray, y: np.ndarray) -> float:
    """Of the least-squares line of y on x; all shapes here have the same number of parameters."""
    residual = y - np.polyval(np.polyfit(x, y, 1), x)
    return float(len(y) * np.log(np.mean(residual**2)) + 2 * 3)
