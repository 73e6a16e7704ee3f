"""CompleteP: Pre-LN with a factor on the branch, and rules for rate, eps and decay, that follow the depth and the
width."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...config import ModelConfig
from ..base import ArchOptions, Factors, Place, arch, xavier_gain
from ..sublayers import MultiHeadAttention, SubLayer
from .preln import PreLN

BASE_LAYERS = 2


def widening(place: Place, options: Any) -> float:
    """Return the width over the base width; 1 without a base width."""
    return 1.0 if options.base_width is None else place.width / options.base_width


@arch(
    "completep",
    title="CompleteP",
    colour="#6a51a3",
    marker="h",
    rank=250,
    gains="even base",
    family="Since 2024",
    stream="sum",
)
class CompleteP(PreLN):
    r"""x_{l+1} = x_l + m^{-a} F(LN(x_l)), m = layers / base layers, a = 1.  CompleteP, Dey et al. 2025 (2505.01618).

    The authors' code (EleutherAI/nanoGPT-mup 3904404) was read. ``arch.base_layers``: the layers of a stack at which
    the model is Pre-LN (m = 1). AdamW's groups: inside the layers the rate is multiplied by m^{a-1} and eps by m^{-a};
    norms and biases have no decay. Before that revision the code (6f8bc3b) multiplied eps by m^{-a} outside the layers
    too; the authors corrected it by the paper's Eq. 40. With a = 1/2 it is depth-muP, by the range of a in that code.
    No matrix is drawn 1 / sqrt(2 layers) smaller: model.init = arch-gpt2 has the initial weights of arch-normal.
    Inferred: m of each stack by itself.

    ``arch.base_width`` adds the rules for width, with n = d / base width. Matrices inside the layers: rate 1/n, decay
    n, and standard deviation .02 / sqrt(n). Everywhere: eps / n. The logits are divided by n. The scale of attention is
    H/d at every width, as in that code. The rules are written for embeddings of N(0, .02^2) without a factor, so they
    need model.embedding_scale = 1 and model.init = arch-normal or arch-gpt2, which gpt2 and llama have. Inferred: an
    untied output is treated as an embedding.
    """

    class Options(ArchOptions):
        a: float = Field(default=1.0, ge=0, le=1)
        base_layers: int = Field(default=BASE_LAYERS, ge=1)
        base_width: int | None = Field(default=None, ge=1)

    multiplier: Tensor

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        ratio = place.layers / self.options.base_layers
        self.ratio = ratio
        # no Python number: each compiled layer would need code of its own for it; a 0-dim tensor promotes nothing
        multiplier = torch.tensor(ratio**-self.options.a, dtype=torch.float64)
        self.register_buffer("multiplier", multiplier, persistent=False)
        self.scaled_branch = torch.nn.Identity()
        self.widening = widening(place, self.options)
        if self.options.base_width is not None and isinstance(f, MultiHeadAttention):
            f.score_scale = f.heads / place.width

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        branch = self.branch(self.f(self.norm(x), *context))
        return self.shortcut(x) + self.scaled_branch(self.multiplier * branch)

    @classmethod
    def objection(cls, config: ModelConfig) -> str:
        if config.options.get("base_width") is None:
            return ""
        if config.embedding_scale == 1 and config.init in ("arch-normal", "arch-gpt2"):
            return ""
        return (
            "arch.base_width needs model.embedding_scale = 1 and model.init = 'arch-normal' or 'arch-gpt2', for which "
            "its rules are written; --model gpt2 and --model llama have both"
        )

    def gain(self, matrix: str) -> float:
        base = "normal" if self.place.base == "gpt2" else self.place.base  # without GPT-2's 1 / sqrt(2 layers)
        return xavier_gain(replace(self.place, base=base), matrix) / math.sqrt(self.widening)

    def factors(self, role: str) -> Factors:
        a, wide = self.options.a, self.widening
        flat = "norm" in role.split(".")[-2] or role.endswith("bias")
        n = wide if role.rpartition(".")[2] in self.f.matrices else 1.0
        return Factors(lr=self.ratio ** (a - 1) / n, eps=self.ratio**-a / wide, decay=0.0 if flat else n)

    @classmethod
    def outer_factors(cls, place: Place, role: str, options: Any = None) -> Factors:
        return Factors(eps=1 / widening(place, options or cls.Options()), decay=0.0 if ".norm." in role else 1.0)

    @classmethod
    def output_factor(cls, place: Place, options: Any = None) -> float:
        return 1 / widening(place, options or cls.Options())

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"multiplier of F": BASE_LAYERS / place.layers, "factor on eps in layers": BASE_LAYERS / place.layers}
