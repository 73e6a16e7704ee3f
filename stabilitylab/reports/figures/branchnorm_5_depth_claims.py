"""A claim on what depth does to quality on little and much data: C45."""

from __future__ import annotations

import math

import numpy as np

from .. import style
from ..base import MissingRuns
from ..claims import NAMED_LATER, Effect, claim, together
from ..collection import Runs
from ..layerwise import failed, of_seed, with_the_protocols_ramp
from ..statistics import Region, slope
from .branchnorm_5 import Quality, by_share, depth_sweeps, quality

BOTH = ("deepnorm", "branchnorm")
Slopes = dict[int, dict[float, float]]  # seed -> share of the data -> slope of quality with log N


@claim(
    "C45",
    figure="branchnorm:5",
    paper="BranchNorm",
    sentence="What depth gains depends on the amount of data: little data loses with depth",
    source="BranchNorm, Fig. 5",
    statistic="of the quality of the runs that trained (BLEU where all reach 5, else -nll): its slope with log N on "
    "each size of the data, the slope of these slopes with log data size (the interaction), mean of DeepNorm and "
    "BranchNorm; beside it each architecture's interaction, and its slope on the smallest data",
    threshold="R: interaction > 0; X: < 0 (the plan names no X: ours)",
    sweep="branchnorm:5",
    after=NAMED_LATER,
)
def depth_needs_data(runs: Runs) -> list[Effect]:
    best: list[tuple[str, Runs, Slopes]] = []
    fit = runs.where(lambda run: not failed(run), kind="train", label=BOTH)
    for group in depth_sweeps(with_the_protocols_ramp(fit)):
        arms = [(label, group.where(label=label)) for label in BOTH]
        found = [(label, own, _slopes(own, quality(group))) for label, own in arms]
        best = max(best, found, key=lambda one: min((len(slopes) for *_, slopes in one), default=0))
    if not best or not all(slopes for *_, slopes in best):
        raise MissingRuns(
            "needs deepnorm and branchnorm trained at two depths or more on two data sizes or more, seed by seed"
        )
    apart, smallest = [], []
    for label, own, slopes in best:
        name, of = style.title(label), own.where(lambda run, slopes=slopes: run.seed in slopes)
        interaction = {seed: _interaction(found) for seed, found in slopes.items()}
        least = {seed: found[min(found)] for seed, found in slopes.items()}
        apart.append(Effect(f"interaction, {name}", interaction, of=of))
        smallest.append(Effect(f"slope on the smallest data, {name}", least, of=of))
    return [together("interaction, mean of both", apart, np.mean, Region(low=0), Region(high=0)), *apart, *smallest]


def _slopes(runs: Runs, measured: Quality) -> Slopes:
    """Of seeds that have two depths or more at each of two sizes or more."""
    shares = by_share(runs)
    found: Slopes = {}
    for seed in runs.seeds:
        slopes = {}
        for share, own in shares.items():
            values = {run.depth: measured.gain(run) for run in of_seed(own, seed)}
            if len(values) > 1 and all(map(math.isfinite, values.values())):
                slopes[share] = slope([math.log(depth) for depth in values], [*values.values()])
        if len(slopes) == len(shares) > 1:
            found[seed] = slopes
    return found


def _interaction(slopes: dict[float, float]) -> float:
    return slope([math.log(share) for share in slopes], [*slopes.values()])
