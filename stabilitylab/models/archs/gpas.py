"""GPAS: a trained gate per layer that shrinks the stream in the forward pass and leaves its gradient unchanged."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import ArchOptions, Place, Residual, arch
from ..sublayers import SubLayer


@arch("gpas", title="GPAS", colour="#D55E00", marker="D", rank=210, gains="base", family="Since 2024", stream="mixed")
class GPAS(Residual):
    r"""y = x_l + F(LN(x_l)), x_{l+1} = y - SiLU(g) stopgrad(y), g one a layer, 0 at the start.  GPAS 2025 (2506.22049).

    The authors' code (dandingsky/GPAS 3198068) was read. The gate multiplies y by 1 - SiLU(g) in the forward pass and
    is the identity in the backward pass. The gradient is therefore not that of the loss, and probes of the Hessian are
    refused. ``arch.host`` names the host: "preln"; "sandwich" and "layernorm-scaling", which have the same form; or
    "postln", where only the shortcut is scaled, LN(x - SiLU(g) stopgrad(x) + F(x)). With every host the stack ends in a
    norm. DeepNorm and Mix-LN as hosts are left out. Inferred: plain Post-LN as a host, by the form of those two; the
    three sub-layers of a decoder's layer share g. The authors clip the gradients of g at .01 in their largest models;
    they are not clipped here. With "layernorm-scaling" 1/sqrt(l) is a constant here, where the authors have it as the
    initial value of the norm's gain.
    """

    final_norm = True
    exact_gradient = False
    learns = "g: 1 a layer, shared by its sub-layers; the final norm of each stack"

    class Options(ArchOptions):
        host: Literal["preln", "sandwich", "layernorm-scaling", "postln"] = "preln"

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        below = given.get("below")
        # registered by all sub-layers that share it, as ReZero's
        self.depth_gate = below.depth_gate if isinstance(below, GPAS) else nn.Parameter(torch.zeros(1))
        self.host = self.options.host
        if self.host == "sandwich":
            f.outer_norm = place.new_norm()
        scale = place.layer**-0.5 if self.host == "layernorm-scaling" else 1.0
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64), persistent=False)

    scale: Tensor

    def shrunk(self, x: Tensor) -> Tensor:
        """Return x (1 - SiLU(g)), with the gradient of x."""
        return x - F.silu(self.depth_gate) * x.detach()

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        if self.host == "postln":
            return self.norm(self.shortcut(self.shrunk(x)) + self.branch(self.f(x, *context)))
        entering = self.norm(x)
        if self.host == "layernorm-scaling":
            entering = self.scale * entering
        return self.shrunk(self.shortcut(x) + self.branch(self.f(entering, *context)))
