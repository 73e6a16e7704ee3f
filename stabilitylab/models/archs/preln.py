"""Pre-LN: a norm in front of each sub-layer."""

from __future__ import annotations

from torch import Tensor

from ..base import Residual, arch


@arch(
    "preln",
    title="Pre-LN",
    colour="#56B4E9",
    marker="^",
    rank=30,
    gains="base",
    family="The papers' own",
    stream="sum",
    prores=True,
)
class PreLN(Residual):
    r"""x_{l+1} = x_l + F(LN(x_l)), and a norm after the last layer of each stack.  Xiong et al. 2020."""

    is_sum = True
    final_norm = True
    learns = "the final norm of each stack"

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.shortcut(x) + self.added(self.f(self.norm(x), *context))
