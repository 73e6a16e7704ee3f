"""ResiDual: Post-LN with a second stream, the plain sum of all branches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base import Place, Residual, Trunk, arch

Streams = tuple[Tensor, Tensor]


class Dual(Trunk):
    """A pair of streams (x, d) that both start as the embedding. The stack ends in x + LN(d)."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.dual_norm = place.new_norm()

    def enter(self, x: Tensor) -> Streams:
        return x, x

    def leave(self, stream: Streams) -> Tensor:
        x, dual = stream
        return x + self.dual_norm(dual)


@arch("resi-dual", title="ResiDual", colour="#0072B2", marker="*", rank=190, gains="base", family="More streams")
class ResiDual(Residual):
    r"""x_{l+1} = LN(x_l + F(x_l)) beside d_{l+1} = d_l + F(x_l); a stack ends in x + LN(d).  ResiDual, Xie et al. 2023
    (2304.14802).

    Sub-layers and probes read x. Weights are initialised as in Post-LN.
    """

    trunk = Dual
    learns = "a norm at the end of each stack"

    def forward(self, x: Any, *context: Tensor | None) -> Any:
        x, dual = x
        branch = self.branch(self.f(x, *context))
        return self.norm(self.shortcut(x) + branch), dual + branch
