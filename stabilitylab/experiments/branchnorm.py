"""The runs of BranchNorm's figures at the scales tiny and paper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .recipe import BRANCHNORM, EARLY, FIGURES, SEEDS, Experiment, Recipe, Settings, probing

# The training of branchnorm:8 without its ramp; branchnorm:7 and :T have ramps of their own.
LONG = {"train": {"lr": 7e-4, "warmup": 300, "steps": 1200}}
DROPOUT = {0.01: 0.4, 0.1: 0.2, 1.0: 0.1}  # BranchNorm's for small, medium and large data, by share of the corpus


@FIGURES.register("branchnorm:1")
def _shallow_models(ask: Recipe) -> Iterator[Experiment]:
    """Post-LN and DeepNorm where both may train; at scale tiny Admin's maps are drawn from the same runs of Post-LN."""
    recipe = {"model": {"T": 300}, "train": {"lr": 7e-4, "warmup": 150, "steps": 600}} if ask.tiny else BRANCHNORM
    depths = (6, 12, 18) if ask.tiny else (6, 12, 18, 24, 30)
    yield from ask.runs(("postln", "deepnorm"), depths, recipe, probing("branch_variance"), seeds=SEEDS[:3])


@FIGURES.register("branchnorm:3")
def _gradient_norm_at_the_beginning(ask: Recipe) -> Iterator[Experiment]:
    """Every row has grad_norm: C09 follows the norm without the branch weights from step to step.

    Inferred: the paper states neither model nor range; at full size 100L-100L and the 4000 updates of its ramp.
    """
    archs = ("postln", "deepnorm", "branchnorm", "branchnorm T=1")
    probes = probing("grad_norm", every=1, update_every=10)
    if ask.tiny:
        yield from ask.runs(archs, [6], EARLY, probes, {"train": {"steps": 500}})
    else:
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
    recipe = {"model": {"T": 200}, "train": {"lr": 7e-4, "warmup": 100, "steps": 400}} if ask.tiny else BRANCHNORM
    for fraction, dropout in DROPOUT.items():
        axes: dict[str, Any] = {"data": {"fraction": fraction}}
        if not ask.tiny:
            axes["model"] = {"dropout": dropout}
        yield from ask.runs(
            ("deepnorm", "branchnorm"),
            (3, 6, 18) if ask.tiny else (6, 18, 50, 100, 250, 500),
            recipe,
            probing(),
            seeds=SEEDS[:3],
            axes=axes,
            tag=f"data{fraction:g}",
        )


@FIGURES.register("branchnorm:6")
def _warmup_and_learning_rate(ask: Recipe) -> Iterator[Experiment]:
    """The paper's four learning rates; at scale tiny one beyond them, and warm-up up to the preset's."""
    warmups = (0, 5, 20, 40) if ask.tiny else (0, 100, 1000, 4000)
    rates = (5e-4, 8e-4, 1e-3, 1.5e-3, *([8e-3] if ask.tiny else []))
    for warmup, lr in itertools.product(warmups, rates):
        yield from ask.runs(
            ("deepnorm", "branchnorm"),
            [6 if ask.tiny else 100],
            {} if ask.tiny else BRANCHNORM,
            probing(),
            seeds=SEEDS[:4] if ask.tiny else (),  # without a failure C40 takes 58 runs of one architecture
            axes={"train": {"warmup": warmup, "lr": lr}},
            tag=f"warmup{warmup}-lr{lr:g}",
        )


@FIGURES.register("branchnorm:7")
def _growth_strategies(ask: Recipe) -> Iterator[Experiment]:
    """Three ways from alpha = 0 to 1 within T: a fifth of the run at scale tiny, the paper's 4000 of 100,000."""
    T, lr = (240, 7e-4) if ask.tiny else (4000, 5e-4)
    for growth in ("linear", "exp", "sigmoid"):
        yield from _ramp(ask, T, lr, growth=growth)


@FIGURES.register("branchnorm:T")
def _length_of_the_ramp(ask: Recipe) -> Iterator[Experiment]:
    """The paper's T as shares of the run, at the usual learning rate and at thrice it (recorded: losses alone)."""
    ramps, lr = ((2, 5, 48, 240), 7e-4) if ask.tiny else ((100, 400, 4000, 20_000), 5e-4)
    for T in ramps:
        yield from _ramp(ask, T, lr)
    for T in ramps:
        yield from _ramp(ask, T, round(3 * lr, 5), probing(), seeds=SEEDS[:3])


def _ramp(
    ask: Recipe, T: int, lr: float, *settings: Settings, growth: str = "linear", seeds: Sequence[int] = ()
) -> Iterator[Experiment]:
    """One ramp of BranchNorm; at scale tiny the layers of runs at the usual rate are on record as well."""
    recipe = (LONG, probing("default")) if ask.tiny else (BRANCHNORM, probing())
    own = {"model": {"T": T, "growth": growth}, "train": {"lr": lr}}
    layers = 6 if ask.tiny else 100
    yield from ask.runs(["branchnorm"], [layers], *recipe, own, *settings, seeds=seeds, tag=f"T{T}-lr{lr:g}")


@FIGURES.register("branchnorm:8")
def _similarity_and_sparsity(ask: Recipe) -> Iterator[Experiment]:
    """At full size both 18L-18L, as the figure's axes read, and 100L-100L, as its text says."""
    judged, others = ("deepnorm", "branchnorm", "branchnorm T=1"), ("postln", "preln", "admin")
    probes = probing("default", "branch_variance")
    if ask.tiny:
        recipe = (LONG, {"model": {"T": 600}}, probes)
        yield from ask.runs(judged, [6], *recipe, seeds=(*SEEDS, 8))
        yield from ask.runs(others, [6], *recipe)
    else:
        yield from ask.runs((*judged, *others), [18], BRANCHNORM, probes)
        yield from ask.runs(judged, [100], BRANCHNORM, probes)


FIGURES.register("branchnorm:9")(_similarity_and_sparsity)
