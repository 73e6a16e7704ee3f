"""DeepNorm: Post-LN with a constant on the shortcut, and the initial gains that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor

from ...config import LARGEST, ModelConfig
from ..base import ArchOptions, Place, arch, without_own_gains
from ..sublayers import SubLayer
from .postln import PostLN


def deepnorm_constants(stack: str, encoder_layers: int, decoder_layers: int) -> tuple[float, float]:
    r"""Return (alpha, beta).  DeepNet, Figure 2, with its 0.87 (torchscale's encoder has 1.15 there).

    Encoder-decoder: .81 (N^4 M)^{1/16}, .87 (N^4 M)^{-1/16} and (3M)^{1/4}, (12M)^{-1/4}; a single stack of L layers:
    (2L)^{1/4}, (8L)^{-1/4}.
    """
    n, m = encoder_layers, decoder_layers
    if not (n and m):
        return (2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25
    if stack == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    return (3 * m) ** 0.25, (12 * m) ** -0.25


UNSCALED = ("q", "k", "gate")  # matrices without beta


def deepnorm_gain(place: Place, matrix: str) -> float:
    """Return the gain of a matrix.  DeepNet, Figure 2: beta on v, out, fc1 and fc2 of every sub-layer; q and k keep 1.

    Ours: 1 for the gate of SwiGLU. F is linear in fc1 and in fc2, so that it is beta^2 F exactly, as with ReLU.
    """
    if matrix in UNSCALED:
        return 1.0
    return deepnorm_constants(place.stack, place.encoder_layers, place.decoder_layers)[1]


@arch(
    "deepnorm",
    title="DeepNorm",
    colour="#E69F00",
    marker="s",
    rank=40,
    gains="beta",
    family="The papers' own",
    prores=True,
)
class DeepNorm(PostLN):
    r"""x_{l+1} = LN(alpha x_l + F(x_l)); v, out, fc1, fc2 drawn with gain beta.  DeepNet, Figure 2.

    For controls, ``arch.beta`` replaces beta, and ``model.alpha`` replaces alpha.
    """

    takes_alpha = True

    class Options(ArchOptions):
        beta: float | None = Field(default=None, ge=0, le=LARGEST)

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        own, _ = deepnorm_constants(place.stack, place.encoder_layers, place.decoder_layers)
        self.alpha = own if given.get("alpha") is None else given["alpha"]

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.norm(self.shortcut(self.alpha * x) + self.added(self.f(x, *context)))

    @classmethod
    def idle(cls, config: ModelConfig) -> Mapping[str, str]:
        why = without_own_gains(config)
        return {"arch.beta": why} if why and config.options.get("beta") is not None else {}

    def gain(self, matrix: str) -> float:
        if self.options.beta is not None and matrix not in UNSCALED:
            return self.options.beta
        return deepnorm_gain(self.place, matrix)

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return dict(
            zip(
                ("alpha", "beta"),
                deepnorm_constants(place.stack, place.encoder_layers, place.decoder_layers),
                strict=True,
            )
        )
