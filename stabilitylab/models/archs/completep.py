"""CompleteP: Pre-LN whose branches, rates, eps and decay follow the depth."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ..base import ArchOptions, Factors, Place, arch
from ..sublayers import SubLayer
from .preln import PreLN

BASE_LAYERS = 2


@arch(
    "completep",
    title="CompleteP",
    colour="#6a51a3",
    marker="h",
    rank=250,
    gains="base",
    family="Since 2024",
    stream="sum",
)
class CompleteP(PreLN):
    r"""x_{l+1} = x_l + m^{-a} F(LN(x_l)), m = layers / base layers, a = 1.  CompleteP, Dey et al. 2025 (2505.01618).

    The code of EleutherAI/nanoGPT-mup 6f8bc3b was read. AdamW's groups: rate m^{a-1} and eps m^{-a} inside the layers,
    eps m^{-a} everywhere, no decay of norms and biases. With a = 1/2 it is depth-muP, after that code's range. This is
    the part for depth; its rules for width (rates, decay, logits and attention's scale by d / d_base) are left out, as
    this model is compared at one width. Inferred: m of each stack by itself. ``arch.base_layers``: layers of a stack at
    which it is Pre-LN.
    """

    class Options(ArchOptions):
        a: float = Field(default=1.0, ge=0, le=1)
        base_layers: int = Field(default=BASE_LAYERS, ge=1)

    multiplier: Tensor

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        ratio = place.layers / self.options.base_layers
        self.ratio = ratio
        # no Python number: each compiled layer would need code of its own for it; a 0-dim tensor promotes nothing
        multiplier = torch.tensor(ratio**-self.options.a, dtype=torch.float64)
        self.register_buffer("multiplier", multiplier, persistent=False)
        self.scaled_branch = torch.nn.Identity()

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        branch = self.branch(self.f(self.norm(x), *context))
        return self.shortcut(x) + self.scaled_branch(self.multiplier * branch)

    def factors(self, role: str) -> Factors:
        a = self.options.a
        flat = "norm" in role.split(".")[-2] or role.endswith("bias")
        return Factors(lr=self.ratio ** (a - 1), eps=self.ratio**-a, decay=0.0 if flat else 1.0)

    @classmethod
    def outer_factors(cls, place: Place, role: str, options: Any = None) -> Factors:
        own = options or cls.Options()
        ratio = place.layers / own.base_layers
        return Factors(eps=ratio**-own.a, decay=0.0 if ".norm." in role else 1.0)

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"multiplier of F": BASE_LAYERS / place.layers, "factor on eps": BASE_LAYERS / place.layers}
