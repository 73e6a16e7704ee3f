"""The runs of DeepNet's and Admin's figures, and of the claims that one step decides, at the scales tiny and paper."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import merge
from .recipe import DEEPNET, EARLY, FIGURES, SEEDS, Experiment, Recipe, Settings, probing

DYNAMICS = ("activation_grad_norm", "grad_norm", "ln_input", "model_update")


@FIGURES.register("deepnet:3")
def _gradient_norm_of_the_last_layer(ask: Recipe) -> Iterator[Experiment]:
    archs, depths = ("postln", "postln-init"), (6, 12, 18, 24)
    if ask.tiny:
        yield from ask.runs(archs, depths, EARLY, probing("grad_norm", every=10), {"train": {"steps": 101}})
        converging = {"train": {"lr": 3e-4, "warmup": 40, "steps": 160}}
        yield from ask.runs(archs, [18], converging, probing("grad_norm"), tag="warmup40")
    else:
        yield from ask.runs(archs, depths, DEEPNET, probing("grad_norm"))


@FIGURES.register("deepnet:4")
def _accumulated_update(ask: Recipe) -> Iterator[Experiment]:
    """Post-LN without warm-up has ten seeds: the order of events of claim C18 is counted over runs."""
    first = {"train": {"steps": 101}}
    size = EARLY if ask.tiny else DEEPNET
    shared = (size, first, probing(*DYNAMICS, every=1, update_every=1))
    cold, warm = {"train": {"warmup": 0}}, {"train": {"warmup": 4000}}
    yield from ask.runs(["postln"], [18], *shared, cold, seeds=range(3, 13), tag="warmup0")
    yield from ask.runs(["postln-init"], [18], *shared, cold, tag="warmup0")
    yield from ask.runs(["postln", "postln-init", "deepnorm", "branchnorm"], [18], *shared, warm, tag="warmup4000")


ONE_STEP_BASE = {"preset": "base", "data": {"sentences": 16}}
ONE_STEP = ("postln", "preln", "postln-init", "postln+beta", "deepnorm", "branchnorm", "branchnorm T=1", "admin")


@FIGURES.register("admin:4")
def _output_change(ask: Recipe) -> Iterator[Experiment]:
    """One step from the initialisation; Admin's figure goes up to 100 layers, at the base size."""
    size: Settings = {"model": {"T": 4000}} if ask.tiny else ONE_STEP_BASE
    depths = (3, 6, 12, 18, 25, 50) if ask.tiny else (3, 6, 12, 18, 25, 50, 100)
    yield from ask.runs(ONE_STEP, depths, size, kind="onestep")
    yield from ask.runs(["branchnorm alpha=0"], [18], size, kind="onestep")


@FIGURES.register("deepnet:5")
def _update_against_depth(ask: Recipe) -> Iterator[Experiment]:
    """DeepNet's own model is 64-128-2, so both scales are of that size; at scale paper the early training as well."""
    size: Settings = {"model": {"T": 4000}}
    deep = ("postln", "deepnorm", "branchnorm")
    if ask.tiny:
        yield from _output_change(ask)
        yield from ask.runs(deep, [100], size, seeds=SEEDS[:3], kind="onestep")
    else:
        depths = (6, 12, 18, 25, 50, 100)
        tiny = merge(EARLY, {"train": {"steps": 101}})
        yield from ask.runs(ONE_STEP, depths, size, kind="onestep", tag="64")
        yield from ask.runs(deep, depths, tiny, probing("model_update", update_every=1), tag="64-train")


@FIGURES.register("claims:fast")
def _claims_of_one_step(ask: Recipe) -> Iterator[Experiment]:
    """All one-step claims; Post-LN encoder with Pre-LN decoder (C05) beside the archs of admin:4."""
    yield from _output_change(ask)
    size: Settings = {"model": {"T": 4000}} if ask.tiny else ONE_STEP_BASE
    yield from ask.runs(["postln/preln"], [18], size, kind="onestep")
