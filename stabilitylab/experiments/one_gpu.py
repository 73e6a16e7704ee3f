"""The common settings of runs at scale h200: one GPU makes such a run of Multi30k in half an hour.

The papers' recipe (lr 5e-4, warm-up and T of 4000 updates, Adam .9 / .98) on one device: batches of at least 4,096
target tokens, as the 4k-token batches for which lr 5e-4 is the custom on small data, in place of 524k. Fixed before any
run at this scale was made; results/h200/README.md gives the reasons and the thresholds. Where architectures are
compared (:func:`choice`, :func:`main`) the recipe is :mod:`.protocol`'s: ramps of 4 % of the run, each arm's own rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..config import merge
from . import protocol
from .recipe import EARLY, SEEDS, Experiment, Recipe, Settings, probing

TEXT = {"data": {"sentences": 192, "max_length": 48, "held_out": 200}}  # rows of 48 tokens, of which half are padding
# On a GPU 45 % of such batches is padding; in eight shapes, all of which are recorded, 26 %: 160 rows are enough.
FULLER = {"data": {"sentences": 160, "shapes": 8, "length_multiple": 8}}
WIDE = merge(TEXT, FULLER, {"preset": "base", "data": {"vocab_size": 8000}, "train": {"precision": "bf16"}})
# 100L-100L at d = 512 would leave 9 GB a run, and write them every ten minutes
NO_WEIGHTS = {"train": {"final_checkpoint": False, "checkpoint_minutes": 0.0}}


def by_seed(ask: Recipe, own: Sequence[int]) -> Iterator[Recipe]:
    """Yield one recipe per seed, so that an unfinished sweep has equally many seeds of each architecture."""
    for seed in ask.seeds or own:
        yield ask.only(seed)


ARMS = ("deepnorm", "branchnorm", "branchnorm T=1")  # of the comparison; the two that the figures compare come first
LAYERS = 18  # a side
PAPERS_RATE = 5e-4
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)  # to choose from: half of the papers' 5e-4, and 1, 2 and 4 times as much
REGULAR: Settings = {"model": {"dropout": 0.3}, "train": {"final_checkpoint": False}}
LONG_RAMP = 0.2  # of the run: the second arm of BranchNorm, at the rate of the first


def choice(
    ask: Recipe, updates: int, arms: Sequence[str] = ARMS, rates: Sequence[float] = RATES
) -> Iterator[Experiment]:
    """Yield the runs from which each arm's rate is chosen: a quarter of ``updates`` long, by default with seeds 100 and
    101."""
    quarter = max(1, updates // 4)
    for seed in ask.seeds or protocol.CHOICE_SEEDS:
        for rate in rates:
            for arm in arms:
                yield protocol.run(arm, LAYERS, seed, rate, quarter, WIDE, REGULAR, probing(), ask.settings)


def main(
    ask: Recipe, updates: int, rates: Mapping[str, float] | None = None, arms: Sequence[str] = ARMS
) -> Iterator[Experiment]:
    """Yield the runs that compare the arms at ``rates`` (None: the papers' rate for all), 18L-18L, with the tables of
    Figures 8 and 9. All arms of a seed come before the next seed; BranchNorm with a ramp of 20 % comes last."""
    rates = dict.fromkeys(arms, PAPERS_RATE) if rates is None else rates
    shared = (WIDE, REGULAR, protocol.WITH_LAYERS, ask.settings)
    for seed in ask.seeds or protocol.SEEDS:
        for arm in arms:
            yield protocol.run(arm, LAYERS, seed, rates[arm], updates, *shared)
    longer = protocol.share(updates, LONG_RAMP)
    for seed in ask.seeds or protocol.SEEDS:
        own: Settings = {"model": {"T": longer}}
        arm = protocol.BRANCH
        yield protocol.run(arm, LAYERS, seed, rates[arm], updates, *shared, own, tags=[f"T{longer}"])


def beginning(ask: Recipe) -> Iterator[Experiment]:
    """Yield runs of the first 100 updates of the papers' recipe, 50L-50L, without and with their warm-up of 4000, with
    gradient norms in every row."""
    every_row = probing("grad_norm", every=1, update_every=10)
    shared = (WIDE, EARLY, NO_WEIGHTS, {"train": {"steps": 100}}, every_row)
    for archs in (("deepnorm", "branchnorm"), ("postln", "branchnorm T=1")):
        for one in by_seed(ask, SEEDS[:3]):
            for warmup in (0, 4000):
                yield from one.runs(archs, [50], *shared, {"train": {"warmup": warmup}}, tag=f"warmup{warmup}")
