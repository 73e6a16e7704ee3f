"""ReZero: no norm, and a trained scalar on the branch that starts at 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base import Place, Residual, arch
from ..sublayers import SubLayer


@arch(
    "rezero",
    title="ReZero",
    colour="#009E73",
    marker="*",
    rank=90,
    gains="base",
    family="Smaller or no branches at first",
    stream="sum",
)
class ReZero(Residual):
    r"""x_{l+1} = x_l + a F(x_l), one a a layer, 0 at the start; no norm.  Bachlechner et al. 2020 (2003.04887).

    At a = 0 a stack is the identity, and every weight inside F has a gradient of exactly 0. Weights are initialised as
    in Post-LN.
    """

    normalised = False
    learns = "a: 1 a layer, shared by its sub-layers"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        below = given.get("below")
        # registered by all sub-layers that share it: a wrapper that replaces parameters (FSDP2) must find every owner
        self.scale = below.scale if isinstance(below, ReZero) else nn.Parameter(torch.zeros(1))
        self.scaled_branch = nn.Identity()

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.shortcut(x) + self.scaled_branch(self.scale * self.branch(self.f(x, *context)))
