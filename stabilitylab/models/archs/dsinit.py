"""DS-Init: Post-LN whose initial weights shrink with depth, as its paper says and as its code does."""

from __future__ import annotations

from ..base import Place, arch
from .postln import PostLN


@arch(
    "dsinit",
    title="DS-Init",
    colour="#D55E00",
    marker="X",
    rank=70,
    gains="times base",
    family="Smaller or no branches at first",
)
class DSInit(PostLN):
    r"""Post-LN, all matrices of layer l drawn l^{-1/2} smaller.  Zhang, Titov and Sennrich 2019 (1908.11365).

    The paper's factor alpha is 1. l restarts at 1 in the decoder. The base gains of q, k and v are those of all
    architectures here.
    """

    def gain(self, matrix: str) -> float:
        return super().gain(matrix) * self.place.layer**-0.5

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"gain in layer 1": 1.0, f"gain in layer {place.layers}": place.layers**-0.5}


@arch(
    "dsinit-code",
    title="DS-Init (code)",
    colour="#CC79A7",
    marker="h",
    rank=80,
    gains="times base",
    family="Smaller or no branches at first",
)
class DSInitCode(PostLN):
    r"""Post-LN, all matrices of layer l drawn l^{-1/4} smaller.  The code of DS-Init's authors (bzhangGo/zero).

    The code passes l^{-1/2} to an initialiser that takes a variance, so the standard deviation shrinks by l^{-1/4}. Its
    q, k and v are one d x 3d matrix in self-attention (hence gain 1/sqrt(2), which is also our base) and three d x d
    matrices in cross-attention (hence gain 1).
    """

    def gain(self, matrix: str) -> float:
        apart = self.place.sublayer == "cross_attn" and self.place.base == "xavier"
        base = 1.0 if apart else super().gain(matrix)
        return base * self.place.layer**-0.25

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"gain in layer 1": 1.0, f"gain in layer {place.layers}": place.layers**-0.25}
