"""LayerNorm scaling: Pre-LN whose norms shrink with depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import Place, arch
from ..sublayers import SubLayer
from .preln import PreLN


@arch(
    "layernorm-scaling",
    title="LayerNorm scaling",
    colour="#636363",
    marker="*",
    rank=180,
    gains="base",
    family="More norms",
    stream="sum",
    prores=True,
)
class LayerNormScaling(PreLN):
    r"""Pre-LN, x_{l+1} = x_l + F(LN(x_l) / sqrt(l)) in layer l.  The Curse of Depth, Sun et al. 2025 (2502.05795).

    1/sqrt(l) is a constant, as in the authors' code. The code of ProRes and of GPAS has it as the initial value of the
    norm's gain instead, and trains it: the same model at the start, and not after. The final norm is not scaled. The
    paper has only decoders. Inferred: l restarts at 1 in each stack.
    """

    scale: Tensor

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        # no Python number: each compiled layer would need code of its own for it; a 0-dim tensor promotes nothing
        scale = torch.tensor(place.layer**-0.5, dtype=torch.float64)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        return self.shortcut(x) + self.added(self.f(self.scale * self.norm(x), *context))

    @staticmethod
    def constants(place: Place) -> dict[str, float]:
        return {"scale in layer 1": 1.0, f"scale in layer {place.layers}": place.layers**-0.5}
