"""Normalisation: LayerNorm or RMSNorm of the stream, and of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5  # the same for all architectures: their epsilons must not differ in a comparison


class LayerNorm(nn.LayerNorm):
    r"""g (x - mean) / sqrt(var + eps) + b, in the type of g: autocast on a CPU would keep bf16.  Ba et al. 2016."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__(width, eps=EPS, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


class RMSNorm(nn.RMSNorm):
    r"""g x / sqrt(mean(x^2) + eps), in the type of g.  Zhang and Sennrich 2019."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class DynamicTanhNorm(nn.Module):
    r"""g tanh(alpha x) + b, alpha one trained number: DyT, in the place of a norm.  Zhu et al. 2025 (2503.10622).

    Each feature is treated alone: nothing is divided by a statistic. ``alpha``: the initial value.
    """

    bias: nn.Parameter | None

    def __init__(self, width: int, bias: bool = True, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = nn.Parameter(torch.ones(width))
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if bias else None)

    def squashed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.weight * self.squashed(x.to(self.weight.dtype))
        return scaled if self.bias is None else scaled + self.bias


class DynamicErfNorm(DynamicTanhNorm):
    r"""g erf(alpha x + s) + b, alpha and s one trained number each, s = 0 at the start: Derf (2512.10938)."""

    def __init__(self, width: int, bias: bool = True, alpha: float = 0.5) -> None:
        super().__init__(width, bias, alpha)
        self.shift = nn.Parameter(torch.zeros(()))

    def squashed(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha * x + self.shift)


ELEMENTWISE: dict[str, type[DynamicTanhNorm]] = {"dyt": DynamicTanhNorm, "derf": DynamicErfNorm}


def new_norm(kind: str, width: int, bias: bool = True, alpha: float = 0.5) -> nn.Module:
    """Return the norm of ``model.norm``. ``bias``: ignored by RMSNorm. ``alpha``: the initial alpha of DyT and Derf."""
    if kind in ELEMENTWISE:
        return ELEMENTWISE[kind](width, bias, alpha)
    return RMSNorm(width) if kind == "rmsnorm" else LayerNorm(width, bias)


class QueryKeyScale(nn.Module):
    r"""QK-norm: each head's query and key normalised over its d/H features.  Dehghani et al. 2023 (2302.05442).

    ``values``: each head's value too (QKV-norm of HybridNorm, 2503.04598). The heads share gains and biases. The class
    is not called a norm: probes would take it for a norm of the stream. Its inputs have a dimension of heads that the
    mask lacks, and in cross-attention queries and keys have different tokens.
    """

    def __init__(self, kind: str, width: int, bias: bool = True, *, values: bool = False) -> None:
        super().__init__()
        self.kind, self.eps, self.values = kind, EPS, values
        for side in ("q", "k", "v")[: 2 + values]:
            self.register_parameter(f"{side}_weight", nn.Parameter(torch.ones(width)))
            shift = None if kind == "rmsnorm" or not bias else nn.Parameter(torch.zeros(width))
            self.register_parameter(f"{side}_bias", shift)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (B, L, H, D/H) each
        return self._scaled("q", q), self._scaled("k", k), self._scaled("v", v) if self.values else v

    def _scaled(self, side: str, x: Tensor) -> Tensor:
        weight, bias = self._parameters[f"{side}_weight"], self._parameters[f"{side}_bias"]
        assert weight is not None
        if self.kind == "rmsnorm":
            scaled = F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps)
        else:
            scaled = F.layer_norm(x, weight.shape, weight, bias, self.eps)
        return scaled.to(x.dtype)  # under autocast attention stays in the short type
