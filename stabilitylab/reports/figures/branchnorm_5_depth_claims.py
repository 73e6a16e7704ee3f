"""Claims on what depth does to quality: C45 and C46."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from ..base import MissingRuns
from ..claims import Effect, claim
from ..collection import LAYERS, Runs
from ..layerwise import comparable, failed
from ..statistics import Region, aic, slope
from .branchnorm_5 import by_share, depth_sweeps, even, quality

LEAST_DEPTHS = 5  # for three curves to be told apart
RESAMPLES = 9999


@claim(
    "C45",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="What depth gains depends on the amount of data: little data loses with depth",
    source="BranchNorm, Fig. 5",
    statistic="of the quality of BranchNorm's runs that trained (BLEU where all reach 5, else -nll): slope with log N "
    "on the smallest data; slope of those slopes with log data size",
    threshold="R: interaction > 0 and slope on the smallest data < 0; X: either of the other sign (the plan names no "
    "X: ours)",
    sweep="branchnorm:5",
)
def depth_needs_data(runs: Runs) -> list[Effect]:
    best: tuple[dict[int, float], dict[int, float]] = {}, {}
    for group in depth_sweeps(runs.where(lambda run: not failed(run), label="branchnorm")):
        shares = by_share(group)
        measured = quality(group)
        interaction: dict[int, float] = {}
        smallest: dict[int, float] = {}
        for seed in group.seeds:
            slopes = {}
            for share, own in shares.items():
                values = {run.depth: measured.gain(run) for run in own if run.seed == seed}
                if len(values) > 1 and all(map(math.isfinite, values.values())):
                    slopes[share] = slope([math.log(depth) for depth in values], [*values.values()])
            if len(slopes) == len(shares) > 1:
                interaction[seed] = slope([math.log(share) for share in slopes], [*slopes.values()])
                smallest[seed] = slopes[min(slopes)]
        best = max(best, (interaction, smallest), key=lambda one: len(one[0]))
    interaction, smallest = best
    if not interaction:
        raise MissingRuns("needs branchnorm trained at two depths or more on two data sizes or more, seed by seed")
    return [
        Effect("interaction", interaction, Region(low=0), Region(high=0), p=_sign_flips([*interaction.values()])),
        Effect("slope on the smallest data", smallest, Region(high=0), Region(low=0)),
    ]


def _sign_flips(values: Sequence[float]) -> float:
    """Two-sided p of the permutation test of a mean of 0 that flips signs; exact for up to 13 seeds."""
    if len(values) < 2:
        return math.nan

    def mean(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(one - other, axis=axis)

    zeros = np.zeros(len(values))
    result: Any = stats.permutation_test(
        (np.asarray(values), zeros), mean, permutation_type="samples", n_resamples=RESAMPLES, vectorized=True, rng=0
    )
    return float(result.pvalue)


@claim(
    "C46",
    figure="branchnorm:5",
    paper="DeepNet",
    sentence="Quality grows with the logarithm of depth",
    source="DeepNet, Fig. 8",
    statistic="of DeepNorm's quality (BLEU where all reach 5, else -nll), at each seed: AIC of A log d + B minus the "
    "least of it, a straight line and a saturating A (1 - exp(-d / c)) + B",
    threshold="R: < 2; X: > 2 (the plan names no X: ours)",
    sweep="branchnorm:5",
)
def logarithmic_in_depth(runs: Runs) -> list[Effect]:
    best: dict[int, float] = {}
    for group in comparable(runs.where(even, kind="train", label="deepnorm"), *LAYERS):
        trained = group.where(lambda run: not failed(run))
        measured = quality(trained)
        found: dict[int, float] = {}
        for seed in trained.seeds:
            points = {run.depth: measured.gain(run) for run in trained if run.seed == seed}
            points = {depth: points[depth] for depth in sorted(points) if math.isfinite(points[depth])}
            if len(points) >= LEAST_DEPTHS:
                found[seed] = log_over_best([*points], [*points.values()])
        best = max(best, found, key=len)
    if not best:
        raise MissingRuns(
            f"needs deepnorm trained at {LEAST_DEPTHS} depths or more",
            "stabilitylab sweep --grid arch=deepnorm depth=6,12,24,48,96 seed=3..7 steps=1200",
        )
    return [Effect("AIC of the logarithm above the least", best, Region(high=2), Region(low=2))]


def log_over_best(depths: Sequence[float], values: Sequence[float]) -> float:
    """AIC of the logarithmic curve minus the least AIC of the three; 0 where the logarithm is best."""
    d, y = np.asarray(depths, float), np.asarray(values, float)
    scores = {"log": aic(np.log(d), y), "linear": aic(d, y), "saturating": _saturating(d, y)}
    return scores["log"] - min(scores.values())


def _saturating(d: np.ndarray, y: np.ndarray) -> float:
    """AIC at the best scale c, looked for between a third of the least and thrice the largest depth."""

    def at(log_scale: float) -> float:
        return aic(1 - np.exp(-d / math.exp(log_scale)), y, 4)

    # two local minima are possible, so a grid comes before the search
    grid = np.linspace(math.log(d.min() / 3), math.log(3 * d.max()), 40)
    start = min(grid, key=at)
    step = grid[1] - grid[0]
    found: Any = optimize.minimize_scalar(at, bounds=(start - step, start + step), method="bounded")
    return min(at(start), float(found.fun))
