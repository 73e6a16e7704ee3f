"""T-Fixup: no norm and no warm-up; small initial weights replace both."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..base import Place, Residual, arch


def tfixup_constants(place: Place) -> tuple[float, float]:
    """Return (gain of v, out, fc1, fc2; gain of the embedding) of a stack: .67 N^{-1/4} and (9N)^{-1/4} for an encoder,
    (9M)^{-1/4} twice for a decoder."""
    embedding = (9 * place.layers) ** -0.25
    return (0.67 * place.layers**-0.25 if place.stack == "encoder" else embedding), embedding


@arch(
    "tfixup",
    title="T-Fixup",
    colour="#393b79",
    marker="v",
    rank=110,
    gains="own",
    family="Smaller or no branches at first",
    stream="sum",
)
class TFixup(Residual):
    r"""x_{l+1} = x_l + F(x_l), no norm, no warm-up; v, out, fc1, fc2 and embeddings small.  Huang et al. 2020.

    q and k have gain 1, as in the paper (its code has 1/sqrt(2)). The paper derives its constants for an encoder with a
    decoder, so a single stack is refused. An embedding that both sides share has the encoder's gain.
    """

    normalised = False
    defined_for = ("encoder-decoder",)
    recipe: ClassVar = {"train": {"warmup": 0}}  # "no warm-up" is part of what the paper proposes

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.shortcut(x) + self.branch(self.f(x, *context))

    def gain(self, matrix: str) -> float:
        return 1.0 if matrix in ("q", "k", "gate") else tfixup_constants(self.place)[0]

    @staticmethod
    def embedding_gain(place: Place) -> float:
        return tfixup_constants(place)[1]

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return dict(zip(("gain of v, out, fc1, fc2", "gain of the embedding"), tfixup_constants(place), strict=True))
