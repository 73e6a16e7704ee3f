"""The functions inside a residual: attention and the feed-forward network, with as few operations as they need."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .norms import QueryKeyScale


class Linear(nn.Linear):
    """``nn.Linear`` that draws nothing when built: its values come from :mod:`.initialisation`.

    ``working``: weight and bias in a shorter type, which passes of training use in place of the parameters.
    """

    working: tuple[Tensor, Tensor | None] | None = None

    def reset_parameters(self) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if self.working is not None and self.training and torch.is_grad_enabled():
            return F.linear(input, *self.working)
        return super().forward(input)


class Embedding(nn.Embedding):
    """``nn.Embedding`` that draws nothing when built: its values come from :mod:`.initialisation`."""

    def reset_parameters(self) -> None:
        pass


Rotation = tuple[Tensor, Tensor]  # cosine and sine of each position and pair of features, (L, 1, D/2H) each


def rotation(length: int, size: int, like: Tensor) -> Rotation:
    r"""Return the rotation of ``length`` positions for heads of ``size`` features: angle t 10000^{-2i/size} for pair i.
    RoPE, Su et al. 2021 (2104.09864)."""
    place = torch.arange(length, dtype=torch.float64, device=like.device)
    pair = torch.arange(0, size, 2, dtype=torch.float64, device=like.device)
    angle = (place[:, None] * torch.exp(pair * (-math.log(10_000.0) / size)))[:, None]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotated(x: Tensor, rotation: Rotation) -> Tensor:  # (B, T, H, D/H)
    """Rotate neighbouring features of ``x``, in the type of x; its tokens are at the last T positions."""
    cosine, sine = (part[part.shape[0] - x.shape[1] :] for part in rotation)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class SubLayer(nn.Module):
    """F of a residual, with optional modules that an architecture may set; ``drop`` is its last operation."""

    inner_norm: nn.Module | None  # in front of the last matrix
    outer_norm: nn.Module | None  # behind it, before dropout
    inner_width: int  # features that enter the last matrix
    matrices: Mapping[str, tuple[str, slice | None]]  # role -> (name of its Linear, its rows in a fused one)
    entries: tuple[str, ...]  # names of the Linears that the residual stream feeds

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.inner_norm = self.outer_norm = None

    def drop(self, x: Tensor) -> Tensor:
        if self.outer_norm is not None:
            x = self.outer_norm(x)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class MultiHeadAttention(SubLayer):
    """Multi-head attention; subclasses compute q, k and v."""

    head_scale: nn.Parameter | None  # (H,), on what each head yields

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = config.heads
        self.attention_dropout = config.attention_dropout
        self.inner_width = config.d_model
        size = config.d_model // config.heads
        self.qk_norm = QueryKeyScale(config.norm, size, config.bias) if config.qk_norm else None
        self.head_scale = None
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, rotation: Rotation | None = None
    ) -> Tensor:  # (B, L, H, D/H) each
        """Return the output of attention. ``rotation``: of the positions of the keys; the queries are the last of
        them."""
        if self.qk_norm is not None:
            q, k, v = self.qk_norm(q, k, v)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=causal,
        )
        if self.head_scale is not None:
            mixed = mixed * self.head_scale[:, None, None]  # (B, H, T, D/H)
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.inner_norm is not None:
            mixed = self.inner_norm(mixed)
        return self.drop(self.out(mixed))  # (B, T, D)


class SelfAttention(MultiHeadAttention):
    """Self-attention; q, k and v are one fused product."""

    entries = ("qkv",)

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__(config)
        d = config.d_model
        self.causal = causal
        self.qkv = Linear(d, 3 * d, bias=config.bias)
        rows = {name: slice(i * d, (i + 1) * d) for i, name in enumerate("qkv")}
        self.matrices = {name: ("qkv", part) for name, part in rows.items()} | {"out": ("out", None)}

    def forward(self, x: Tensor, mask: Tensor | None = None, rotation: Rotation | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        return self.attend(q, k, v, mask, self.causal, rotation)


class CrossAttention(MultiHeadAttention):
    """Attention of the decoder's stream over the encoder's output; k and v are one fused product."""

    entries = ("q",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d = config.d_model
        self.q = Linear(d, d, bias=config.bias)
        self.kv = Linear(d, 2 * d, bias=config.bias)
        self.matrices = {"q": ("q", None), "k": ("kv", slice(0, d)), "v": ("kv", slice(d, 2 * d)), "out": ("out", None)}

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = self.kv(memory).unflatten(2, (2, self.heads, -1)).unbind(2)
        return self.attend(self.q(x).unflatten(2, (self.heads, -1)), k, v, mask, causal=False)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "swiglu": nn.SiLU}


class FeedForward(SubLayer):
    """fc2(act(fc1(x))), act = ReLU or GELU; or SwiGLU, fc2(SiLU(gate(x)) * fc1(x)).  Shazeer 2020 (2002.05202).

    SwiGLU has three matrices. ``fc1`` is the factor in which it is linear, as it is in ``fc2``: LLaMA's W_3 and W_2;
    ``gate`` is its W_1.
    """

    gate: Linear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.activation_dropout = config.activation_dropout
        self.inner_width = config.d_ffn
        gated = config.activation == "swiglu"
        self.gate = Linear(config.d_model, config.d_ffn, bias=config.bias) if gated else None
        self.fc1 = Linear(config.d_model, config.d_ffn, bias=config.bias)
        self.activation: nn.Module = ACTIVATIONS[config.activation]()
        self.fc2 = Linear(config.d_ffn, config.d_model, bias=config.bias)
        names = ("gate", "fc1", "fc2") if gated else ("fc1", "fc2")
        self.matrices = {name: (name, None) for name in names}
        self.entries = names[:-1]

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = self.activation(self.fc1(x))  # (B, T, F)
        else:
            hidden = self.activation(self.gate(x)) * self.fc1(x)
        if self.activation_dropout:
            hidden = F.dropout(hidden, self.activation_dropout, self.training)
        if self.inner_norm is not None:
            hidden = self.inner_norm(hidden)
        return self.drop(self.fc2(hidden))
