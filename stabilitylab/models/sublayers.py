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

    score_scale: float | None = None  # on the products of queries and keys; None: 1 / sqrt(d/H)
    head_scale: nn.Parameter | None  # (H,), on what each head yields
    gate: Linear | None  # of gated attention, Qiu et al. 2025 (2505.06708): H or D numbers a token, before the sigmoid

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = config.heads
        self.attention_dropout = config.attention_dropout
        self.inner_width = config.d_model
        size = config.d_model // config.heads
        self.qk_norm = QueryKeyScale(config.norm, size, config.bias) if config.qk_norm else None
        self.head_scale = None
        gates = {"off": 0, "head": config.heads, "element": config.d_model}[config.attention_gate]
        self.gate = Linear(config.d_model, gates, bias=config.bias) if gates else None
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)

    def gates(self, x: Tensor) -> Tensor | None:
        """Return the gates of the tokens that query, (B, T, H or D), before the sigmoid; None without gates."""
        return None if self.gate is None else self.gate(x)

    def gated(self) -> tuple[dict[str, tuple[str, slice | None]], tuple[str, ...]]:
        """Return the entries of ``matrices`` and ``entries`` for the gate; empty ones without gates."""
        return ({}, ()) if self.gate is None else ({"gate": ("gate", None)}, ("gate",))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        rotation: Rotation | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:  # (B, L, H, D/H) each
        """Return the output of attention, (B, L, D). ``rotation``: that of all positions of the keys; the queries are
        at the last positions."""
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
            scale=self.score_scale,
        )
        if self.head_scale is not None:
            mixed = mixed * self.head_scale[:, None, None]  # (B, H, T, D/H)
        mixed = mixed.transpose(1, 2)  # (B, T, H, D/H)
        if gates is not None:
            mixed = mixed * gates.sigmoid().unflatten(2, (self.heads, -1))
        mixed = mixed.flatten(2)
        if self.inner_norm is not None:
            mixed = self.inner_norm(mixed)
        return self.drop(self.out(mixed))  # (B, T, D)


class FirstValues:
    """The values of a stack's first self-attention, for the value residual: written in layer 1, read above it.

    It lives within one call of one layer. From layer to layer the values go as an input and an output, so that a layer
    that is computed again in the backward pass, or compiled, sees them.
    """

    def __init__(self, values: Tensor | None) -> None:
        self.values = values  # (B, L, H, D/H); None: not yet known


class SelfAttention(MultiHeadAttention):
    r"""Self-attention; q, k and v are one fused product.

    Value residual (``model.value_residual``): V_l <- w_1 V_1 + w_2 V_l above layer 1, before the values are normalised
    or weighted, V_1 = W_v x of layer 1.  ResFormer, Zhou et al. 2024 (2410.17897); the authors' code
    (Zcchill/Value-Residual-Learning 95652f6) has w = (1/2, 1/2), fixed. "learned": each layer trains its own two
    numbers, a variant of the paper that we know from notes only (unsure). Inferred: each stack has its own V_1, and
    cross-attention is plain.
    """

    value_weights: nn.Parameter | None  # (2,)

    def __init__(self, config: ModelConfig, *, causal: bool, first: bool = False) -> None:
        super().__init__(config)
        self.fixed_weights = config.value_weights
        learned = config.value_residual == "learned" and not first
        self.value_weights = nn.Parameter(torch.tensor(config.value_weights)) if learned else None
        d = config.d_model
        self.causal = causal
        self.qkv = Linear(d, 3 * d, bias=config.bias)
        rows = {name: slice(i * d, (i + 1) * d) for i, name in enumerate("qkv")}
        gate, fed = self.gated()
        self.matrices = {name: ("qkv", part) for name, part in rows.items()} | gate | {"out": ("out", None)}
        self.entries = ("qkv", *fed)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        first: FirstValues | None = None,
    ) -> Tensor:
        q, k, v = self.projected(x, first)
        return self.attend(q, k, v, mask, self.causal, rotation, self.gates(x))

    def projected(self, x: Tensor, first: FirstValues | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of ``x``, (B, L, H, D/H) each; ``first`` gives the values of layer 1, or
        takes them."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        if first is None:
            return q, k, v
        if first.values is None:
            first.values = v
            return q, k, v
        own = self.fixed_weights if self.value_weights is None else self.value_weights.to(v.dtype).unbind()
        return q, k, own[0] * first.values + own[1] * v


class CrossAttention(MultiHeadAttention):
    """Attention of the decoder's stream over the encoder's output; k and v are one fused product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        d = config.d_model
        self.q = Linear(d, d, bias=config.bias)
        self.kv = Linear(d, 2 * d, bias=config.bias)
        gate, fed = self.gated()
        rows = {"q": ("q", None), "k": ("kv", slice(0, d)), "v": ("kv", slice(d, 2 * d))}
        self.matrices = {**rows, **gate, "out": ("out", None)}
        self.entries = ("q", *fed)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = self.kv(memory).unflatten(2, (2, self.heads, -1)).unbind(2)
        q = self.q(x).unflatten(2, (self.heads, -1))
        return self.attend(q, k, v, mask, causal=False, gates=self.gates(x))


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
