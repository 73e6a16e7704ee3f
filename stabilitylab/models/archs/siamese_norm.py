"""SiameseNorm: a normalised stream and a second stream, a plain sum; the sub-layers read both."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base import ArchOptions, Place, Residual, Trunk, arch
from ..sublayers import SubLayer

Streams = tuple[Tensor, Tensor]


class Siamese(Trunk):
    """A pair of streams (p, y) that both start as the embedding. The stack ends in p + LN(y)."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.plain_norm = place.new_norm()

    def enter(self, x: Tensor) -> Streams:
        return x, x

    def leave(self, stream: Streams) -> Tensor:
        normed, plain = stream
        return normed + self.plain_norm(plain)


@arch(
    "siamese-norm",
    title="SiameseNorm",
    colour="#E69F00",
    marker="D",
    rank=290,
    gains="base",
    family="More streams, since 2024",
    stream="mixed",
)
class SiameseNorm(Residual):
    r"""o = F(LN(p + LN(y))); p <- LN(p + o / sqrt(c)), y <- y + o; a stack ends in p + LN(y).  SiameseNorm, Li et al.
    2026 (2602.08064).

    Notes of the paper, and the authors' code for vision and for language models (Qwen-Applications/SiameseNorm 46b6bf4
    and fac844f), were read. Depth scale: with ``arch.depth_scale = layer``, c is the layer's number from 1, as in the
    notes. With ``twice``, c is twice that number, as in both codes. With ``off``, c = 1. ``arch.inner = false`` leaves
    out the norm in front of F. The codes differ from the notes in more, which is left out here: the norm of p stands at
    the start of the next sub-layer, so that p is normalised where it enters the stack too, and the sum at the end has a
    norm of its own; the language models normalise q, k and v in each head, and have attention without the norm in front
    of F. Probes read p. Inferred: each stack of an encoder-decoder has its own streams.
    """

    trunk = Siamese
    learns = "two more norms a sub-layer, and a norm at the end of each stack"

    class Options(ArchOptions):
        depth_scale: Literal["layer", "twice", "off"] = "layer"
        inner: bool = True

    scale: Tensor

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.plain_norm = place.new_norm()
        self.inner_norm = place.new_norm() if self.options.inner else None
        depth = {"layer": place.layer, "twice": 2 * place.layer, "off": 1}[self.options.depth_scale]
        self.register_buffer("scale", torch.tensor(1 / math.sqrt(depth), dtype=torch.float64), persistent=False)
        self.scaled_branch = nn.Identity()

    def forward(self, x: Any, *context: Tensor | None) -> Any:
        normed, plain = x
        entering = normed + self.plain_norm(plain)
        if self.inner_norm is not None:
            entering = self.inner_norm(entering)
        branch = self.branch(self.f(entering, *context))
        return self.norm(self.shortcut(normed) + self.scaled_branch(self.scale * branch)), plain + branch

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {f"1 / sqrt(c) in layer {place.layers}": place.layers**-0.5}
