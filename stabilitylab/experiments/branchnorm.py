"""The runs of BranchNorm's figures at the scales tiny and paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..config import Config
from . import protocol
from .recipe import BRANCHNORM, FIGURES, SEEDS, Experiment, Recipe, probing

DROPOUT = {0.01: 0.4, 0.1: 0.2, 1.0: 0.1}  # BranchNorm's for small, medium and large data, by share of the corpus


PAPER_RATES = (5e-4, 8e-4, 1e-3, 1.5e-3)
BASE_WIDTH = 512  # at which these rates are stated
GRID_UPDATES = 500  # of branchnorm:6 at scale tiny


@FIGURES.register("branchnorm:1")
def _shallow_models(ask: Recipe) -> Iterator[Experiment]:
    """Post-LN and DeepNorm where both may train: at scale tiny those of the comparison."""
    if ask.tiny:
        yield from protocol.main(ask, only=(protocol.POST, protocol.DEEP))
    else:
        yield from ask.runs(
            ("postln", "deepnorm"), (6, 12, 18, 24, 30), BRANCHNORM, probing("branch_variance"), seeds=SEEDS[:3]
        )


@FIGURES.register("branchnorm:3")
def _gradient_norm_at_the_beginning(ask: Recipe) -> Iterator[Experiment]:
    """Every row has grad_norm: C09 follows the norm without the branch weights from step to step.

    Inferred: the paper states neither model nor range; at full size 100L-100L and the 4000 updates of its ramp, at
    scale tiny the whole ramp of the comparison.
    """
    if ask.tiny:
        yield from protocol.beginning(ask)
    else:
        archs = ("postln", "deepnorm", "branchnorm", "branchnorm T=1")
        probes = probing("grad_norm", every=1, update_every=10)
        yield from ask.runs(archs, [100], BRANCHNORM, probes, {"train": {"steps": 4000}})


@FIGURES.register("branchnorm:4")
def _quality_over_updates(ask: Recipe) -> Iterator[Experiment]:
    """At scale tiny the runs of branchnorm:8; at full size 50L-50L, with the ablation that has no ramp."""
    if ask.tiny:
        yield from _similarity_and_sparsity(ask)
    else:
        yield from ask.runs(("deepnorm", "branchnorm", "branchnorm T=1"), [50], BRANCHNORM, probing())


@FIGURES.register("branchnorm:5")
def _quality_against_depth(ask: Recipe) -> Iterator[Experiment]:
    """At scale tiny 400 updates by the protocol, at the rates of the comparison."""
    archs = (protocol.DEEP, protocol.BRANCH)
    for fraction, dropout in DROPOUT.items():
        axes: dict[str, Any] = {"data": {"fraction": fraction}}
        tag = f"data{fraction:g}"
        if ask.tiny:
            for seed, layers, arch in itertools.product(ask.seeds or SEEDS[:3], (3, 6, 18), archs):
                rate = protocol.chosen(arch, layers)
                yield protocol.run(arch, layers, seed, rate, 400, probing(), ask.settings, axes, tags=[tag])
        else:
            axes["model"] = {"dropout": dropout}
            depths = (6, 18, 50, 100, 250, 500)
            yield from ask.runs(archs, depths, BRANCHNORM, probing(), seeds=SEEDS[:3], axes=axes, tag=tag)


@FIGURES.register("branchnorm:6")
def _warmup_and_learning_rate(ask: Recipe) -> Iterator[Experiment]:
    """The paper's four warm-ups and learning rates. At scale tiny the warm-ups are the same shares of 500 updates (0,
    .1, 1 and 4 %; T is 4 %), and the rates are multiplied by 512 / 64, as a narrower model bears larger ones (Adam's
    rate goes with 1 / width, Yang et al. 2022, 2203.03466)."""
    for warmup, rate in itertools.product((0, 100, 1000, 4000), PAPER_RATES):
        if ask.tiny:
            updates = math.ceil(warmup / 100_000 * GRID_UPDATES)
            axes = {"train": {"warmup": updates}}
            for seed, arch in itertools.product(ask.seeds or protocol.SEEDS, (protocol.DEEP, protocol.BRANCH)):
                wide = rate * BASE_WIDTH / Config().model.d_model
                settings = (probing(), ask.settings, axes)
                yield protocol.run(arch, 6, seed, wide, GRID_UPDATES, *settings, tags=[f"warmup{updates}"])
        else:
            axes = {"train": {"warmup": warmup, "lr": rate}}
            tag = f"warmup{warmup}-lr{rate:g}"
            yield from ask.runs(("deepnorm", "branchnorm"), [100], BRANCHNORM, probing(), axes=axes, tag=tag)


@FIGURES.register("branchnorm:7")
def _growth_strategies(ask: Recipe) -> Iterator[Experiment]:
    """Three ways from alpha = 0 to 1 within T, the paper's 4000 of 100,000 updates, or 4 % of the run."""
    if ask.tiny:
        yield from protocol.growths(ask)
        return
    for growth in ("linear", "exp", "sigmoid"):
        yield from _ramp(ask, 4000, 5e-4, growth=growth)


@FIGURES.register("branchnorm:T")
def _length_of_the_ramp(ask: Recipe) -> Iterator[Experiment]:
    """The paper's T as shares of the run; at full size also at thrice the learning rate."""
    if ask.tiny:
        yield from protocol.ramps(ask)
        return
    for rate, seeds in ((5e-4, ()), (1.5e-3, SEEDS[:3])):
        for T in (100, 400, 4000, 20_000):
            yield from _ramp(ask, T, rate, seeds=seeds)


def _ramp(ask: Recipe, T: int, lr: float, *, growth: str = "linear", seeds: Sequence[int] = ()) -> Iterator[Experiment]:
    """One ramp of BranchNorm at full size."""
    own = {"model": {"T": T, "growth": growth}, "train": {"lr": lr}}
    yield from ask.runs(["branchnorm"], [100], BRANCHNORM, probing(), own, seeds=seeds, tag=f"T{T}-lr{lr:g}")


@FIGURES.register("branchnorm:8")
def _similarity_and_sparsity(ask: Recipe) -> Iterator[Experiment]:
    """At scale tiny the comparison of Protocol 2, 18L-18L as the figure's axes read, and 6L-6L; at full size 18L-18L
    and 100L-100L, as its text says."""
    if ask.tiny:
        yield from protocol.main(ask)
    else:
        judged, others = ("deepnorm", "branchnorm", "branchnorm T=1"), ("postln", "preln", "admin")
        yield from ask.runs((*judged, *others), [18], BRANCHNORM, protocol.WITH_LAYERS)
        yield from ask.runs(judged, [100], BRANCHNORM, protocol.WITH_LAYERS)


FIGURES.register("branchnorm:9")(_similarity_and_sparsity)
