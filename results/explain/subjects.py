"""The two models of the validation, their data, and the loop whose moments a fault may change."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, ROWS, WIDTH = 24, 12, 8, 24
STEPS, FIRST = 120, 70  # updates of a run; the update at which a fault begins
Batch = dict[str, Tensor]


class Layer(nn.Module):
    """A Pre-LN layer; ``scale`` multiplies the queries."""

    def __init__(self, cross: bool, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 + cross))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True) if cross else None
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.scale, self.causal = nn.Dropout(0.1), 1.0, causal

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        h = self.norms[0](x)
        allowed = mask[:, None, :]  # (B, 1, T)
        if self.causal:
            allowed = allowed & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        q, k, v = self.query(h) * self.scale, self.key(h), self.value(h)
        x = x + self.dropout(
            self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.expand(-1, x.shape[1], -1)))
        )
        if self.cross is not None and memory is not None and memory_mask is not None:
            attended, _ = self.cross(
                self.norms[2](x), memory, memory, key_padding_mask=~memory_mask, need_weights=False
            )
            x = x + self.dropout(attended)
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Model(nn.Module):
    """A decoder-only language model, or an encoder-decoder that repeats its source one token later."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.pair = kind == "encoder-decoder"
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.encoder = nn.ModuleList(Layer(cross=False, causal=False) for _ in range(2 if self.pair else 0))
        self.decoder = nn.ModuleList(Layer(cross=self.pair, causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, mask: Tensor, source: Tensor | None = None) -> Tensor:
        memory = None
        if self.pair and source is not None:
            memory = self.embed(source) + self.places
            for layer in self.encoder:
                memory = layer(memory, mask, None, None)
        x = self.embed(tokens) + self.places
        for layer in self.decoder:
            x = layer(x, mask, memory, mask)
        return self.head(self.norm(x))


def batch(kind: str, number: int) -> Batch:
    """Rows that count on modulo the vocabulary, 1 or 2 a step, padded at the end; and the source, if there is one."""
    draw = torch.Generator().manual_seed(number)
    first = torch.randint(VOCAB, (ROWS, 1), generator=draw)
    by = torch.randint(1, 3, (ROWS, 1), generator=draw)
    row = (first + by * torch.arange(LENGTH + 1)) % VOCAB
    mask = torch.arange(LENGTH)[None] < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=draw)
    found = {"tokens": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous(), "mask": mask}
    return {**found, "source": found["tokens"].flip(1)} if kind == "encoder-decoder" else found


def loss_fn(model: Any, given: Batch) -> Tensor:
    """The mean cross-entropy of real tokens."""
    logits = model(given["tokens"], given["mask"], given.get("source"))
    return F.cross_entropy(logits[given["mask"]], given["labels"][given["mask"]])


class Loop:
    """A loop that does what it declares. A fault is a subclass that overrides a moment.

    ``kinds``: the findings, and words of causes, that name the fault rightly. ``places``: parts of the place, one of
    which must be in it; empty: any. ``scope``: False for a fault that nothing declared could show: "no cause found" is
    right. ``own``: True if the fault lies in the model, so that a replay has it too.
    """

    kinds: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    scope, own = True, False
    rate = 3e-3

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.model = Model(kind, seed)
        self.optimizer: torch.optim.Optimizer = self.make_optimizer()
        self.zeroes, self.steps, self.micro = True, 1, 1

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate)

    def number(self, t: int, part: int = 0) -> int:
        return 10_000 * self.seed + 2 * t + part

    def between(self, t: int) -> None: ...

    def batch(self, t: int, part: int = 0) -> Batch:
        return batch(self.kind, self.number(t, part))

    def loss(self, t: int, given: Batch) -> Tensor:
        return loss_fn(self.model, given) / self.micro

    def gradients(self, t: int) -> None: ...

    def handed(self, t: int) -> None: ...

    def after(self, t: int) -> None: ...
