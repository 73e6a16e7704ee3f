"""Sub-LN (Magneto): Pre-LN with a second norm in front of each branch's last matrix."""

from __future__ import annotations

import math
from typing import Any

from ..base import Place, arch
from ..sublayers import CrossAttention, SubLayer
from .preln import PreLN


def subln_gamma(place: Place) -> float:
    r"""Return gamma: sqrt(ln(3M) ln(2N) / 3) for an encoder below a decoder, sqrt(ln 3M) for that decoder; sqrt(ln 2L)
    for a single stack."""
    n, m = place.encoder_layers, place.decoder_layers
    if not (n and m):
        return math.sqrt(math.log(2 * (n + m)))
    if place.stack == "encoder":
        return math.sqrt(math.log(3 * m) * math.log(2 * n) / 3)
    return math.sqrt(math.log(3 * m))


@arch("subln", title="Sub-LN", colour="#009E73", marker="p", rank=150, gains="own", family="More norms", stream="sum")
class SubLN(PreLN):
    r"""x + W_o LN(heads(LN(x))) and x + W_2 LN(relu(W_1 LN(x))); v, out, fc1, fc2 drawn with gamma.  Magneto, Wang et
    al. 2022 (2210.06423).

    q and k have gain 1. Cross-attention has no inner norm and gain 1, as in the authors' code.
    """

    learns = "a norm in front of out (d; not in cross-attention) and of fc2 (d_ffn); the final norm"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        if not isinstance(f, CrossAttention):
            f.inner_norm = place.new_norm(f.inner_width)

    def gain(self, matrix: str) -> float:
        return 1.0 if matrix in ("q", "k", "gate") or self.place.sublayer == "cross_attn" else subln_gamma(self.place)

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"gamma": subln_gamma(place)}
