"""Scale h200: what one GPU makes of Multi30k in half an hour, in the order in which it is worth most.

The papers' recipe (lr 5e-4, warm-up and T of 4000 updates, Adam .9 / .98) on one device: batches of at least 4,096
target tokens, as the 4k-token batches for which lr 5e-4 is the custom on small data, in place of 524k. Fixed before any
run at this scale was made; results/h200/README.md gives the reasons and the thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import merge
from ..registry import Registry
from .protocol import WITH_LAYERS, share
from .recipe import EARLY, SEEDS, Experiment, FigureRuns, Recipe, probing

ONE_GPU: Registry[FigureRuns] = Registry("figure at scale h200")
LENGTH = 2000  # updates of branchnorm:8, where none are asked for
RAMP, LONG_RAMP = 0.04, 0.2  # warm-up and T are 4 % of them (Protocol 2); a second arm has the paper's largest T
TEXT = {"data": {"sentences": 192, "max_length": 48, "held_out": 200}}  # rows of 48 tokens, of which half are padding
WIDE = merge(TEXT, {"preset": "base", "data": {"vocab_size": 8000}, "train": {"precision": "bf16"}})
# 100L-100L at d = 512 would leave 9 GB a run, and write them every ten minutes
NO_WEIGHTS = {"train": {"final_checkpoint": False, "checkpoint_minutes": 0.0}}
SIX = (*SEEDS, 8)


def _by_seed(ask: Recipe, own: Sequence[int]) -> Iterator[Recipe]:
    """One recipe a seed, so that whatever is finished has as many seeds of one architecture as of another."""
    for seed in ask.seeds or own:
        yield ask.only(seed)


@ONE_GPU.register("branchnorm:3")
def _gradient_norm_at_the_beginning(ask: Recipe) -> Iterator[Experiment]:
    """The first 300 of the paper's updates at 100L-100L, without and with its warm-up of 4000."""
    shared = (WIDE, EARLY, NO_WEIGHTS, {"train": {"steps": 300}}, probing("grad_norm", every=1, update_every=10))
    for archs in (("deepnorm", "branchnorm"), ("postln", "branchnorm T=1")):
        for one in _by_seed(ask, SEEDS[:3]):
            for warmup in (0, 4000):
                yield from one.runs(archs, [100], *shared, {"train": {"warmup": warmup}}, tag=f"warmup{warmup}")


@ONE_GPU.register("branchnorm:8")
def _similarity_and_sparsity(ask: Recipe) -> Iterator[Experiment]:
    """18L-18L; six seeds of the two that the figures compare come before the ablation, that before Post-LN and Admin,
    and last BranchNorm with a ramp of 20 %."""
    steps = ask.steps or LENGTH
    ramp = share(steps, RAMP)
    train = {"steps": steps, "warmup": ramp, "lr": 5e-4, "schedule": "linear"}
    length = {"model": {"T": ramp, "dropout": 0.2}, "train": train}
    for archs in (("deepnorm", "branchnorm"), ("branchnorm T=1",), ("postln gain=1", "admin")):
        for one in _by_seed(ask, SIX):
            yield from one.runs(archs, [18], WIDE, length, WITH_LAYERS)
    longer = share(steps, LONG_RAMP)
    for one in _by_seed(ask, SIX):
        yield from one.runs(["branchnorm"], [18], WIDE, length, {"model": {"T": longer}}, WITH_LAYERS, tag=f"T{longer}")


ONE_GPU.register("branchnorm:9")(_similarity_and_sparsity)


@ONE_GPU.register("deepnet:5")
def _update_against_depth(ask: Recipe) -> Iterator[Experiment]:
    """DeepNet's own model, 64-128-2, and its first 100 updates. In float32: an update moves a weight by 1e-5 of itself
    at first, and bfloat16 sees 4e-3. The deepest first, since they take longest."""
    shared = (TEXT, EARLY, NO_WEIGHTS, {"train": {"steps": 100}}, probing("model_update"))
    for one in _by_seed(ask, SEEDS[:3]):
        for layers in (100, 50, 25, 18, 12, 6):
            yield from one.runs(("postln", "deepnorm", "branchnorm", "admin"), [layers], *shared)
