"""Mix-LN: Post-LN in the lower layers of a stack, Pre-LN above."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field
from torch import Tensor

from ..base import ArchOptions, Place, Residual, arch
from ..sublayers import SubLayer

SHARE = 0.25


def last_post_layer(layers: int, share: float = SHARE) -> int:
    """Return floor(share * layers), the number of Post-LN layers at the bottom of a stack."""
    return math.floor(share * layers + 1e-9)  # .29 * 100 is a little less than 29


@arch(
    "mix-ln", title="Mix-LN", colour="#56B4E9", marker="X", rank=220, gains="base", family="Since 2024", stream="mixed"
)
class MixLN(Residual):
    r"""LN(x + F(x)) in layers l <= floor(a N), x + F(LN(x)) above, and a final norm.  Mix-LN, Li et al. 2024
    (2412.13795).

    The authors' code (pixeli99/MixLN ff45826) was read; its a is 1/4. ``arch.post_share`` is a. Inferred: a and the
    boundary hold for each stack by itself. Below 1/a layers a stack is that of Pre-LN.
    """

    final_norm = True
    learns = "the final norm of each stack"

    class Options(ArchOptions):
        post_share: float = Field(default=SHARE, ge=0, le=1)

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.is_post = place.layer <= last_post_layer(place.layers, self.options.post_share)

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        if self.is_post:
            return self.norm(self.shortcut(x) + self.branch(self.f(x, *context)))
        return self.shortcut(x) + self.branch(self.f(self.norm(x), *context))

    @classmethod
    def equal(cls, place: Place, options: Options) -> str:
        return "" if last_post_layer(place.layers, options.post_share) else "preln"

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"Post-LN layers": float(last_post_layer(place.layers))}
