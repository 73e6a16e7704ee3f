"""The three models of the validation: a GPT, a Llama and an encoder-decoder, each small, with its parts in the open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, KV, LAYERS = 47, 48, 6, 2, 3


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.mean = nn.Parameter(torch.ones(WIDTH)), 1e-6, False

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if x.dtype is torch.bfloat16 else x
        y = y - y.mean(-1, keepdim=True) if self.mean else y
        return (y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Every knob is that of a correct attention; a mutant turns one."""

    def __init__(self, kv: int = HEADS, causal: bool = True, rope: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, kv * size, bias), nn.Linear(WIDTH, kv * size, bias)
        self.kv, self.causal, self.rope, self.scale = kv, causal, rope, size**-0.5
        self.shift, self.swap, self.tiled, self.interleaved, self.cap = 0, False, False, False, 0.0
        self.turns, self.heads_last, self.window, self.offset = ("q", "k"), False, 0, 0

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (self._split(layer(given)) for layer, given in ((self.q, x), (self.k, source), (self.v, source)))
        if self.rope:
            q, k = (self._turned(y) if name in self.turns else y for name, y in (("q", q), ("k", k)))
        repeats = HEADS // self.kv
        if repeats > 1:
            k, v = (y.repeat(1, repeats, 1, 1) if self.tiled else y.repeat_interleave(repeats, 1) for y in (k, v))
        k = k.flip(1) if self.swap else k
        scores = self.scale * q @ k.transpose(-1, -2)
        scores = self.cap * torch.tanh(scores / self.cap) if self.cap else scores
        if self.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(self.shift)
            seen = seen.triu(1 - self.window) if self.window else seen
            scores = scores.masked_fill(~seen, -1e9)
        mixed = scores.softmax(-1) @ v
        mixed = mixed.permute(0, 2, 3, 1) if self.heads_last else mixed.transpose(1, 2)
        return self.out(mixed.flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # (B, H, T, d)

    def _turned(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        rates = self.rope ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = ((torch.arange(x.shape[-2]) + self.offset)[:, None] * rates).to(x.dtype)
        sin, cos = angles.sin(), angles.cos()
        if self.interleaved:
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class FeedForward(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], gated: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(3 * WIDTH, WIDTH, bias)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias) if gated else None
        self.act, self.swapped = act, False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        if self.gate is None:
            return self.fc2(self.act(inner))
        gate = self.gate(x)
        return self.fc2(self.act(inner) * gate if self.swapped else self.act(gate) * inner)


class Block(nn.Module):
    """Pre-LN, or Post-LN with a cross-attention if there is a memory."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: dict[str, Any],
        ffn: dict[str, Any],
        pre: bool,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.ffn = norm(), Attention(**attention), norm(), FeedForward(**ffn)
        if cross:
            self.norm3, self.cross = norm(), Attention(causal=False)
        self.pre, self.skip, self.gain = pre, "input", 1.0

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if not self.pre:
            x = self.norm1(x + self.gain * self.attn(x))
            if memory is not None:
                x = self.norm3(x + self.cross(x, memory))
            return self.norm2((self.ffn(x) if self.skip == "branch" else x) + self.ffn(x))
        normed = self.norm1(x)
        x = (normed if self.skip == "normed" else x) + self.gain * self.attn(normed)
        return (0 if self.skip == "none" else x) + self.ffn(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(32, WIDTH) if positions else None
        self.offset, self.scale = 0, 1.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale * self.tokens(ids)
        return x if self.positions is None else x + self.positions(torch.arange(ids.shape[1]) + self.offset)


class Decoder(nn.Module):
    """A GPT, or a Llama."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        norm = RMSNorm if llama else lambda: nn.LayerNorm(WIDTH)
        attention = {"kv": KV, "rope": 10_000.0, "bias": False} if llama else {}
        ffn = {"act": F.silu, "gated": True, "bias": False} if llama else {"act": F.gelu}
        self.embedding = Embedding(not llama)
        self.layers = nn.ModuleList(Block(norm, attention, ffn, True) for _ in range(LAYERS))
        self.norm, self.head = norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    """A Post-LN encoder-decoder; the source is the ids, reversed."""

    def __init__(self) -> None:
        super().__init__()
        norm, ffn = (lambda: nn.LayerNorm(WIDTH)), {"act": F.relu}
        self.source, self.embedding = Embedding(True), Embedding(True)
        self.encoder = nn.ModuleList(Block(norm, {"causal": False}, ffn, False) for _ in range(LAYERS))
        self.layers = nn.ModuleList(Block(norm, {}, ffn, False, cross=True) for _ in range(LAYERS))
        self.norm, self.head = norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        memory, x = self.source(ids.flip(1)), self.embedding(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(self.norm(x))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: Decoder(llama=False),
    "llama": lambda: Decoder(llama=True),
    "translator": Translator,
}


def made(name: str, seed: int) -> nn.Module:
    """Return a model with gains and biases that are not 1 and 0, as after training."""
    torch.manual_seed(seed)
    model = MAKERS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, float(parameter.mean() > 0.5), 0.1)
    return model


def batch(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1000 + seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def loss_in_bf16(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, ids)
