"""Sandwich-LN and Peri-LN: norms on both sides of each sub-layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..base import Place, Trunk, arch
from ..sublayers import SubLayer
from .preln import PreLN


@arch(
    "sandwich",
    title="Sandwich-LN",
    colour="#8c6d31",
    marker="h",
    rank=160,
    gains="base",
    family="More norms",
    stream="sum",
    prores=True,
)
class Sandwich(PreLN):
    r"""x_{l+1} = x_l + LN(F(LN(x_l))), and a norm after the last layer of each stack.  CogView (2105.13290).

    Dropout comes after the outer norm, as it comes last in every branch here.
    """

    learns = "a second norm a sub-layer; the final norm"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        f.outer_norm = place.new_norm()


class EmbeddingNorm(Trunk):
    """The norm of the embedding: LN(x_0) enters the first layer."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.embedding_norm = place.new_norm()

    def enter(self, x: Tensor) -> Tensor:
        return self.embedding_norm(x)


@arch(
    "periln", title="Peri-LN", colour="#56B4E9", marker="o", rank=170, gains="base", family="More norms", stream="sum"
)
class PeriLN(Sandwich):
    r"""Sandwich-LN over a normalised embedding, x_0 <- LN(x_0).  Kim et al. 2025 (2502.02732).

    The norm of the embedding is the only difference to Sandwich-LN; the paper calls it optional.
    """

    trunk = EmbeddingNorm
    learns = "a second norm a sub-layer; a norm of the embedding; the final norm"
