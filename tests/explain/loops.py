"""A small decoder-only model, its text, and a training loop in which faults are planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.explain import Recorder

VOCAB, WIDTH, LENGTH, ROWS = 13, 16, 8, 8
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Tiny(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(number: int) -> Batch:
    """Rows that count on, modulo the vocabulary; the labels are the next tokens."""
    draw = torch.Generator().manual_seed(number)
    first = torch.randint(VOCAB, (ROWS, 1), generator=draw)
    row = (first + torch.arange(LENGTH + 1)) % VOCAB
    return {"tokens": row[:, :-1], "labels": row[:, 1:]}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Loop:
    """The state that a fault may touch: ``at`` is called at the named moments of update t."""

    def __init__(self, lr: float = 1e-2, layers: int = 2, dropout: float = 0.1) -> None:
        self.model = Tiny(layers, dropout)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.zeroes = True

    def between(self, t: int) -> None:
        """Called before update t."""

    def batch(self, t: int) -> Batch:
        return batch(t)

    def gradients(self, t: int) -> None:
        """Called between backward and ``w.step``."""

    def handed(self, t: int) -> None:
        """Called between ``w.step`` and the optimizer's step."""

    def after(self, t: int) -> None:
        """Called after the optimizer's step."""


def train(
    loop: Loop, out: Path | None, steps: int = 40, recorder: Recorder | None = None, **options: Any
) -> dict[str, Any]:
    """Train; return everything that a recorder must not change. ``out`` None: without a watcher."""
    torch.manual_seed(5)
    losses: list[Tensor] = []

    def go(w: Any) -> None:
        for t in range(steps):
            loop.between(t)
            one = loop.batch(t)
            if w is not None:
                w.batch(one)
            loss = loss_fn(loop.model, one)
            loss.backward()
            loop.gradients(t)
            if w is not None:
                w.step(loss=loss)
            loop.handed(t)
            loop.optimizer.step()
            loop.after(t)
            if loop.zeroes:
                loop.optimizer.zero_grad()
            losses.append(loss.detach())

    if out is None:
        go(None)
    else:
        options = {"probes": "none", "reference": None, **options}
        with sl.watch(loop.model, out=out, optimizer=loop.optimizer, record=recorder, **options) as w:
            go(w)
    return {"losses": losses, "parameters": [*loop.model.parameters()], "rng": torch.get_rng_state()}


def recorder(**settings: Any) -> Recorder:
    given: dict[str, Any] = {"every": 8, "digests": 4, "labels": "labels", "after": 12, **settings}
    return Recorder(loss_fn, **given)


def ready() -> dict[str, Any]:
    """A factory, as ``stabilitylab explain --factory`` takes it."""
    model = Tiny()
    return {"model": model, "loss_fn": loss_fn, "optimizer": torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)}
