"""DLCL: the input of every layer is a trained combination of the outputs of all layers below."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..base import Place, Trunk, arch
from .postln import PostLN
from .preln import PreLN

History = tuple[Tensor, ...]


class Combination(Trunk):
    r"""The stream of DLCL: sum_{k <= l} W_{lk} LN_k(y_k), where y_k is the output of layer k. It is the input of layer
    l+1, and after the last layer the output of the stack.

    y_0, the embedding, is not normalised. W starts as the average, W_{lk} = 1 / (l + 1). Its upper triangle is unused.
    Work grows with the square of the depth.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        rows = torch.arange(1, place.layers + 2)
        self.combination = nn.Parameter((rows[:, None] >= rows) / rows[:, None])  # (N + 1, N + 1)
        self.history_norm = nn.ModuleList(place.new_norm() for _ in range(place.layers))

    def combined(self, history: History) -> Tensor:
        weights = self.combination[len(history) - 1, : len(history)].unbind()
        total = weights[0] * history[0]
        for weight, y in zip(weights[1:], history[1:], strict=True):
            total = total + weight * y
        return total

    def enter(self, x: Tensor) -> History:
        return (x,)

    def before(self, stream: History) -> Tensor:
        return self.combined(stream)

    def after(self, stream: History, y: Tensor) -> History:
        return (*stream, self.history_norm[len(stream) - 1](y))

    def leave(self, stream: History) -> Tensor:
        return self.combined(stream)


class NormalisedCombination(Combination):
    """The stream LN_l(sum_{k <= l} W_{lk} y_k). The embedding (l = 0) is not normalised."""

    def after(self, stream: History, y: Tensor) -> History:
        return (*stream, y)

    def before(self, stream: History) -> Tensor:
        x = self.combined(stream)
        return x if len(stream) == 1 else self.history_norm[len(stream) - 2](x)

    def leave(self, stream: History) -> Tensor:
        return self.before(stream)


@arch("dlcl", title="DLCL", colour="#8c6d31", marker="^", rank=120, gains="base", family="More streams", stream="mixed")
class DLCL(PreLN):
    r"""Pre-LN, layer l+1 over sum_{k <= l} W_{lk} LN_k(y_k), y_k the output of layer k.  DLCL, Wang et al. 2019
    (1906.01787).

    One more combination comes before the final norm.
    """

    trunk = Combination
    learns = "W: (N + 1)^2 numbers, N norms and a final one for each stack of N layers"

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"last row of W": 1 / (place.layers + 1)}


@arch(
    "dlcl-post",
    title="DLCL (Post-LN)",
    colour="#D55E00",
    marker="s",
    rank=130,
    gains="base",
    family="More streams",
    stream="mixed",
)
class DLCLPost(PostLN):
    r"""Post-LN, layer l+1 over LN_l(sum_{k <= l} W_{lk} y_k), y_k the output of layer k.  DLCL, Wang et al. 2019
    (1906.01787).

    One more combination, with its norm, ends the stack.
    """

    trunk = NormalisedCombination
    learns = "W: (N + 1)^2 numbers and N norms for each stack of N layers"

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return DLCL.constants(place)
