"""The runs of BranchNorm's figures at the scales tiny and paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .recipe import BRANCHNORM, EARLY, FIGURES, SEEDS, Experiment, Recipe, probing

DROPOUT = {0.01: 0.4, 0.1: 0.2, 1.0: 0.1}  # BranchNorm's for small, medium and large data, by share of the corpus


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


@FIGURES.register("branchnorm:8")
def _similarity_and_sparsity(ask: Recipe) -> Iterator[Experiment]:
    """At full size both 18L-18L, as the figure's axes read, and 100L-100L, as its text says."""
    judged, others = ("deepnorm", "branchnorm", "branchnorm T=1"), ("postln", "preln", "admin")
    probes = probing("default", "branch_variance")
    if ask.tiny:
        recipe = {"model": {"T": 600}, "train": {"lr": 7e-4, "warmup": 300, "steps": 1200}}
        yield from ask.runs(judged, [6], recipe, probes, seeds=(*SEEDS, 8))
        yield from ask.runs(others, [6], recipe, probes)
    else:
        yield from ask.runs((*judged, *others), [18], BRANCHNORM, probes)
        yield from ask.runs(judged, [100], BRANCHNORM, probes)


FIGURES.register("branchnorm:9")(_similarity_and_sparsity)
