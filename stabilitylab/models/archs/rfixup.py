"""R-Fixup, the Transformer of Fixup: no norm, but zero and small initial weights, and trained scalars."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...config import ModelConfig
from ...designs import DESIGNS
from ..base import Place, Residual, Trunk, arch, xavier_gain
from ..sublayers import FeedForward, SubLayer


class Shift(nn.Module):
    """A trained shift: x - b, where b is one number that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.b


class RFixupTrunk(Trunk):
    """The end of a stack: s (x - b) for an encoder, x - b for a decoder."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.shift = Shift()
        self.scale = nn.Parameter(torch.ones(1)) if place.stack == "encoder" else None

    def leave(self, stream: Tensor) -> Tensor:
        x = self.shift(stream)
        return x if self.scale is None else self.scale * x


@arch(
    "rfixup",
    title="R-Fixup",
    colour="#0072B2",
    marker="p",
    rank=100,
    gains="times base",
    family="Smaller or no branches at first",
    stream="sum",
)
class RFixup(Residual):
    r"""x_{l+1} = x_l + s F(x_l - b), F without biases, W_2 (relu(W_1 x - b_1) - b_2).  Fixup, Zhang et al. 2019
    (1901.09321).

    There is no norm. Initial weights are those of the authors' Transformer: q, k and v are drawn L^{-1/6} smaller, fc1
    L^{-1/2} smaller; out, fc2 and an untied output matrix are 0. L is the number of sub-layers of the model. (The
    authors' cross-attention takes 12 for any L; this is not followed.) In cross-attention b shifts the query alone.
    Inferred: L of a single stack.
    """

    normalised = False
    trunk = RFixupTrunk
    output_gain = 0.0
    learns = "b, s: 6 numbers a layer, 8 with cross-attention; 2 at the end of an encoder, 1 of a decoder"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        for module in f.modules():
            if isinstance(module, nn.Linear):
                module.register_parameter("bias", None)
        if isinstance(f, FeedForward):
            f.activation = nn.Sequential(OrderedDict(before=Shift(), relu=f.activation, after=Shift()))
        self.shift = Shift()
        self.scale = nn.Parameter(torch.ones(1))
        self.scaled_branch = nn.Identity()

    @classmethod
    def objection(cls, config: ModelConfig) -> str:
        if config.activation != "swiglu":
            return ""
        return (
            "Fixup's gains and shifts are derived for feed-forward blocks of two matrices, and SwiGLU has three; give "
            "--set model.activation=relu, or another architecture"
        )

    @classmethod
    def idle(cls, config: ModelConfig) -> Mapping[str, str]:
        by_design = DESIGNS[config.design].get("bias", True)
        if config.bias or config.bias == by_design or (config.qk_norm and config.norm == "layernorm"):
            return {}
        return {"model.bias": "the architecture has no biases"}

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        branch = self.branch(self.f(self.shift(x), *context))
        return self.shortcut(x) + self.scaled_branch(self.scale * branch)

    def gain(self, matrix: str) -> float:
        if matrix in ("out", "fc2"):
            return 0.0
        power = -1 / 2 if matrix == "fc1" else -1 / 6  # -1 / (2m - 2) for m matrices in a branch
        return xavier_gain(self.place, matrix) * self.place.sublayers**power

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"gain of q, k, v": place.sublayers ** (-1 / 6), "gain of fc1": place.sublayers ** (-1 / 2)}
