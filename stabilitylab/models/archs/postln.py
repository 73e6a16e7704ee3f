"""Post-LN: the Transformer as first published."""

from __future__ import annotations

from torch import Tensor

from ..base import Residual, arch


@arch(
    "postln",
    title="Post-LN",
    colour="#D55E00",
    marker="o",
    rank=10,
    gains="base",
    family="The papers' own",
    prores=True,
)
class PostLN(Residual):
    r"""x_{l+1} = LN(x_l + F(x_l)).  Vaswani et al. 2017; initialised with Xavier, q, k, v with gain 1/sqrt(2)."""

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(x) + self.added(self.f(x, *context)))
