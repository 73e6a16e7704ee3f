"""The runs of Admin's figures at the scales tiny and paper; those of admin:4 stand with the other one-step runs."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import merge
from ..labels import label
from .recipe import BASE, FIGURES, SEEDS, Experiment, Recipe, probing

SHOWN = ("postln", "preln", "admin")
# The authors' repository: RAdam, embeddings shared, dropout inside the sub-layers too.
_AUTHORS = merge(
    BASE,
    {"model": {"tie": "all", "attention_dropout": 0.1, "activation_dropout": 0.1}},
    {"train": {"optimizer": "radam"}},
)
WMT = {"train": {"lr": 1e-3, "warmup": 8000, "steps": 500_000, "accumulate": 8, "weight_decay": 0.0}}
IWSLT = {
    "model": {"d_ffn": 1024, "heads": 4, "dropout": 0.3},
    "train": {"warmup": 1, "schedule": "linear", "steps": 100_000},
}


@FIGURES.register("admin:5")
def _gradients_and_updates(ask: Recipe) -> Iterator[Experiment]:
    """At full size those of the runs of branchnorm:8 that the figure shows, 18 layers a side."""
    if ask.tiny:
        yield from ask.runs(SHOWN, [6], {"train": {"lr": 7e-4, "warmup": 300, "steps": 1200}}, probing("default"))
        return
    for each in FIGURES["branchnorm:8"](ask):
        if label(each.config.model) in SHOWN and each.config.model.encoder_layers == 18:
            yield each


@FIGURES.register("admin:6")
def _dependency_of_a_shallow_model(ask: Recipe) -> Iterator[Experiment]:
    yield from _dependency(ask, 6)


@FIGURES.register("admin:7")
def _dependency_of_a_deep_model(ask: Recipe) -> Iterator[Experiment]:
    yield from _dependency(ask, 18)


def _dependency(ask: Recipe, layers: int) -> Iterator[Experiment]:
    probes = probing("branch_variance")
    if ask.tiny:
        recipe = {"train": {"lr": 7e-4, "warmup": 150, "steps": 600}}
        yield from ask.runs(SHOWN, [layers], recipe, probes, seeds=SEEDS[:3])
    else:
        yield from ask.runs(SHOWN, [layers], _AUTHORS, WMT, probes, tag="radam")


@FIGURES.register("admin:grid")
def _second_moment_and_learning_rate(ask: Recipe) -> Iterator[Experiment]:
    """At scale tiny the learning rates are ten times the paper's, the model being an eighth as wide and the training
    short, and the optimizer is AdamW; fixed before any of these runs was made."""
    archs = ("postln", "preln") if ask.tiny else SHOWN
    recipe = {"train": {"warmup": 1, "schedule": "linear"}} if ask.tiny else merge(_AUTHORS, IWSLT)
    for lr in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3) if ask.tiny else (1e-4, 2e-4, 3e-4, 4e-4, 5e-4):
        for beta2 in (0.99, 0.995, 0.999):
            axes = {"train": {"lr": lr, "beta2": beta2}}
            tag = f"lr{lr:g}-beta{beta2:g}"
            yield from ask.runs(archs, [6], recipe, probing(), seeds=SEEDS[:3], axes=axes, tag=tag)
