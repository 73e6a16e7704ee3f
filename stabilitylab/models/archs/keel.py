"""KEEL: Post-LN with a shortcut that is multiplied by the number of sub-layers, and a norm in front of each branch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base import ArchOptions, Place, Residual, arch
from ..sublayers import SubLayer


def keel_alpha(place: Place) -> float:
    """Return alpha = L, the sub-layers of the stack: 2M for a decoder alone. Inferred: 2N and 3M above an encoder."""
    return float(place.stack_sublayers)


@arch("keel", title="KEEL", colour="#0072B2", marker="P", rank=200, gains="base", family="Since 2024")
class Keel(Residual):
    r"""x_{l+1} = LN(alpha x_l + F(LN(x_l))), alpha = L, all sub-layers.  KEEL, Chen and Wei 2026 (2601.19895), Eqs. 8,
    28.

    Norms have gains and no biases. The first attention of a stack is x + F(LN(x)), without an outer norm. The other
    sub-layers of layer 1 have alpha = 1 (Sec. 3.1). The last outer norm is the final norm, since the paper does not
    mention another. The paper trains decoders. Inferred: alpha = 2N and 3M in an encoder-decoder, with these exceptions
    at the bottom of each stack. ``arch.inner = false`` leaves the inner norms out (the ablation of its Eq. 24).
    """

    takes_alpha = True
    learns = "a second norm a sub-layer, no biases in norms; the first attention has one norm"

    class Options(ArchOptions):
        inner: bool = True

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.is_first = place.layer == 1 and place.sublayer == "self_attn"
        own = keel_alpha(place) if given.get("alpha") is None else given["alpha"]
        self.alpha = 1.0 if place.layer == 1 else own
        self.norm = place.new_norm(bias=False)
        if self.is_first:  # its one norm stands in front of F
            del self.norm
        self.inner_norm = place.new_norm(bias=False) if self.options.inner or self.is_first else None

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        branch = self.branch(self.f(x if self.inner_norm is None else self.inner_norm(x), *context))
        total = self.shortcut(self.alpha * x) + branch
        return total if self.is_first else self.norm(total)

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"alpha": keel_alpha(place)}
