"""HybridNorm: normalised queries, keys and values, Post-LN around attention, no norm at the feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...config import ModelConfig
from ..base import Place, Residual, arch
from ..norms import QueryKeyScale
from ..sublayers import MultiHeadAttention, SubLayer


@arch(
    "hybridnorm",
    title="HybridNorm",
    colour="#009E73",
    marker="v",
    rank=230,
    gains="base",
    family="Since 2024",
    stream="mixed",
)
class HybridNorm(Residual):
    r"""LN(x + A(x)), x + G(x); q, k, v of A RMS-normalised in each head; a final norm.  HybridNorm, Zhuo et al. 2025
    (2503.04598), Eqs. 5-7.

    The paper writes y = x + A(x), LN(y) + G(LN(y)), which is the same, bit for bit. The gains of q, k and v are shared
    by the heads and have no biases. Weights are initialised with the base of all architectures; the paper has a
    truncated normal with the standard deviation 1 / sqrt(2.5 d) (``model.init = arch-gpt2`` is similar for d near 1000
    alone). Inferred: cross-attention is treated like self-attention.
    """

    final_norm = True
    learns = "3 d/H gains an attention; no norm of feed-forward blocks; the final norm of each stack"
    first_is_preln = False

    def __init__(self, f: SubLayer, place: Place, **given: Any) -> None:
        super().__init__(f, place, **given)
        self.is_pre = self.first_is_preln and place.layer == 1
        if isinstance(f, MultiHeadAttention):
            f.qk_norm = QueryKeyScale("rmsnorm", place.width // f.heads, values=True)
        elif not self.is_pre:
            del self.norm

    @classmethod
    def idle(cls, config: ModelConfig) -> Mapping[str, str]:
        own = "the architecture has a norm of queries, keys and values of its own"
        return {"model.qk_norm": own} if config.qk_norm else {}

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        if self.is_pre:
            return self.shortcut(x) + self.branch(self.f(self.norm(x), *context))
        total = self.shortcut(x) + self.branch(self.f(x, *context))
        return self.norm(total) if self.place.sublayer != "ffn" else total


@arch(
    "hybridnorm-star",
    title="HybridNorm*",
    colour="#CC79A7",
    marker="^",
    rank=240,
    gains="base",
    family="Since 2024",
    stream="mixed",
)
class HybridNormStar(HybridNorm):
    r"""HybridNorm, with x + A(LN(x)), x + G(LN(x)) in layer 1.  HybridNorm*, Zhuo et al. 2025 (2503.04598).

    Inferred: this holds for layer 1 of each stack, its cross-attention included.
    """

    first_is_preln = True
    learns = "3 d/H gains an attention; no norm of feed-forward blocks above layer 1; the final norm of each stack"
