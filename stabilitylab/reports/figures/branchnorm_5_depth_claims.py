"""A claim on what depth does to quality on little and much data: C45."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from ..base import MissingRuns
from ..claims import Effect, claim
from ..collection import Runs
from ..layerwise import failed
from ..statistics import Region, slope
from .branchnorm_5 import by_share, depth_sweeps, quality

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
