"""Post-LN with smaller initial weights in the lower layers."""

from __future__ import annotations

from ..base import Place, arch
from .postln import PostLN


@arch(
    "postln-init",
    title="Post-LN-init",
    colour="#CC79A7",
    marker="v",
    rank=20,
    gains="times base",
    family="The papers' own",
)
class PostLNInit(PostLN):
    r"""Post-LN, all matrices of layer l drawn 1 / k_l smaller, k_l = N - l + 1.  DeepNet, Figure 3.

    Inferred: "the weights of the l-th layer" are all its weights, those of q and k too, and N is the depth of the
    layer's own stack.
    """

    def gain(self, matrix: str) -> float:
        return super().gain(matrix) / (self.place.layers - self.place.layer + 1)

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"gain in layer 1": 1 / place.layers, f"gain in layer {place.layers}": 1.0}
