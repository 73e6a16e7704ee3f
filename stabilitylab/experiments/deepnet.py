"""The runs of DeepNet's and Admin's figures, and of the claims that one step decides, at the scales tiny and paper."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import merge
from .recipe import BRANCHNORM, DEEPNET, EARLY, FIGURES, SEEDS, Experiment, Recipe, Settings, probing

GAIN_1 = ("postln gain=1", "postln-init gain=1")  # DeepNet's own definition of the two
DYNAMICS = ("activation_grad_norm", "grad_norm", "ln_input", "model_update")


@FIGURES.register("deepnet:3")
def _gradient_norm_of_the_last_layer(ask: Recipe) -> Iterator[Experiment]:
    """Post-LN as DeepNet defines it, with Xavier gain 1 for every matrix, and as fairseq draws it beside it."""
    archs, depths = (*GAIN_1, "postln", "postln-init"), (6, 12, 18, 24)
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
    for post, init in (GAIN_1, ("postln", "postln-init")):
        yield from ask.runs([post], [18], *shared, cold, seeds=range(3, 13), tag="warmup0")
        yield from ask.runs([init], [18], *shared, cold, tag="warmup0")
        yield from ask.runs([post, init], [18], *shared, warm, tag="warmup4000")
    yield from ask.runs(["deepnorm", "branchnorm"], [18], *shared, warm, tag="warmup4000")


ONE_STEP_BASE = {"preset": "base", "data": {"sentences": 16}}
ONE_STEP = (
    *GAIN_1,
    "postln",
    "preln",
    "postln-init",
    "postln+beta",
    "deepnorm",
    "branchnorm",
    "branchnorm T=1",
    "admin",
)


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
    deep = (GAIN_1[0], "postln", "deepnorm", "branchnorm")
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


# Each setting of Figure 7 that varies, one at a time; Inferred: the paper prints its values in a picture alone.
VARIED: dict[str, Settings] = {
    "lr0.0005": {"train": {"lr": 5e-4}},
    "lr0.0015": {"train": {"lr": 1.5e-3}},
    "sentences8": {"data": {"sentences": 8}},
    "sentences32": {"data": {"sentences": 32}},
    "width96": {"model": {"d_model": 96, "d_ffn": 192, "heads": 3}},
    "width128": {"model": {"d_model": 128, "d_ffn": 256, "heads": 4}},
}
VARIED_AT_FULL_SIZE: dict[str, Settings] = {
    "lr0.0005": {"train": {"lr": 5e-4}},
    "lr0.0015": {"train": {"lr": 1.5e-3}},
    "accumulate64": {"train": {"accumulate": 64}},
    "accumulate256": {"train": {"accumulate": 256}},
    "width768": {"model": {"d_model": 768, "d_ffn": 3072, "heads": 12}},
    "width1024": {"model": {"d_model": 1024, "d_ffn": 4096, "heads": 16}},
}


@FIGURES.register("deepnet:7")
def _one_setting_at_a_time(ask: Recipe) -> Iterator[Experiment]:
    """18L-18L DeepNorm about one baseline; at full size long enough for width 1024 to overfit, after 10,000 updates."""
    length = {"warmup": 75, "steps": 300} if ask.tiny else {"steps": 20_000}
    recipe = merge({} if ask.tiny else BRANCHNORM, {"train": length})
    baseline: Settings = {"train": {"lr": 1e-3}}
    for tag, one in {"": {}, **(VARIED if ask.tiny else VARIED_AT_FULL_SIZE)}.items():
        axes = merge(baseline, one)
        yield from ask.runs(["deepnorm"], [18], recipe, probing(), seeds=SEEDS[:3], axes=axes, tag=tag)


@FIGURES.register("deepnet:8")
def _logarithm_of_depth(ask: Recipe) -> Iterator[Experiment]:
    """The paper has 6, 10, 50, 100 and 500 layers a side."""
    recipe: Settings = {"model": {"T": 200}, "train": {"lr": 7e-4, "warmup": 100, "steps": 400}}
    depths = (3, 6, 12, 24, 48) if ask.tiny else (6, 10, 50, 100, 500)
    yield from ask.runs(["deepnorm"], depths, recipe if ask.tiny else BRANCHNORM, probing(), seeds=SEEDS[:3])
