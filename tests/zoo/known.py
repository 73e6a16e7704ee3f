"""The layouts and the models of the other tests here, as entries of the zoo."""

from __future__ import annotations

from typing import Any

import torch
from animals import ZOO as ANIMALS
from entries import Entry
from layouts import LAYOUTS, ids

NORMS = {
    "nanogpt": "transformer.h.{0,1,2}.ln_{1,2} transformer.ln_f",
    "torchtitan": "layers.{0,1,2}.ln_{1,2} norm",
    "a stage of a pipeline": "layers.{4,5}.ln_{1,2} norm",
    "a hybrid": "backbone.blocks.{0,1,2,3}.ln_{1,2}",
    "attention as 'sa'": "backbone.blocks.{0,1}.ln_{1,2}",
    "a fused mixer, d_ff = d": "backbone.blocks.{0,1}.ln_{1,2}",
    "projections in the block": "backbone.blocks.{0,1}.norm{1,2}",
    "lists of lists": "layers.{0,1,2,3}.0.0 final_norm",
}
ENDS = {"lists of lists": "layers.{0,1,2,3}.2"}


def _laid_out(name: str) -> Entry:
    layout = LAYOUTS[name]
    return Entry(
        layout.build,
        " ".join(path for path, _ in layout.layers),
        NORMS[name],
        " ".join(layout.activations),
        " ".join(layout.outputs),
        " ".join(layout.attentions),
        lambda: {"ids": ids()},
        ends=ENDS.get(name, ""),
    )


def _animal(name: str) -> Entry:
    animal = ANIMALS[name]

    def feed() -> dict[str, Any]:
        batch = {key: value for key, value in animal.batch(0).items() if key not in ("source", "target")}
        return {key: value.double() if torch.is_floating_point(value) else value for key, value in batch.items()}

    places = (animal.layers, animal.norms, animal.activations, animal.outputs)
    return Entry(animal.build, *map(" ".join, places), attentions=None, feed=feed)


KNOWN: dict[str, Entry] = {name: _laid_out(name) for name in LAYOUTS} | {
    name: _animal(name) for name in ("bert", "gpt2", "t5", "marian", "vit", "torch")
}
