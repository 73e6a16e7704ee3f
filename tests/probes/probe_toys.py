"""Anybody's model: a small Post-LN encoder-decoder that knows nothing of us; its batches, a sink, a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stabilitylab.probes import PROBES, Watcher
from stabilitylab.schema import Cells, Table

VOCAB, WIDTH = 23, 8
CURVATURE = {name for name, probe in PROBES.items() if probe.on == "curvature"}  # which need a loss of their own
# what finds its places in a model that shows no branches and has no experts
BY_NAME = {name for name, probe in PROBES.items() if probe.by_name}
WITHOUT_TAPS = set(PROBES) - {"branch_variance", "router", "mixing_gain"} - CURVATURE - BY_NAME


class Alpha:
    """A schedule on the host, as anybody would write it."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def get(self) -> float:
        return self.value

    def set(self, value: float) -> None:
        self.value = value


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:  # (B, T, D), (B, L, D), (B, L)
        scores = self.q(x) @ self.k(y).transpose(1, 2) / WIDTH**0.5
        return self.o(scores.masked_fill(~mask[:, None, :], -1e30).softmax(-1) @ self.v(y))


class ToyLayer(nn.Module):
    def __init__(self, alpha: Alpha, cross: bool, dropout: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.self_attn, self.norm1 = Attention(), nn.LayerNorm(WIDTH)
        if cross:
            self.cross_attn, self.norm2 = Attention(), nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout, self.norm3 = nn.Dropout(dropout), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, *context: Tensor) -> Tensor:
        alpha = self.alpha.get()
        x = self.norm1(x + alpha * self.dropout(self.self_attn(x, x, mask)))
        if context:  # the encoder's output and its mask
            x = self.norm2(x + alpha * self.dropout(self.cross_attn(x, *context)))
        return self.norm3(x + alpha * self.dropout(self.linear2(F.relu(self.linear1(x)))))


class ToyStack(nn.Module):
    def __init__(self, alpha: Alpha, layers: int, cross: bool, dropout: float, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(ToyLayer(alpha, cross, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, *rest, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x, *rest)
        return self.norm(x)


class Toy(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0, recompute: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.alpha = Alpha()
        self.embed_source, self.embed_target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.encoder = ToyStack(self.alpha, layers, False, dropout, recompute)
        self.decoder = ToyStack(self.alpha, layers, True, dropout, recompute)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor, target_mask: Tensor) -> Tensor:
        memory = self.encoder(self.embed_source(source), source_mask)
        return self.head(self.decoder(self.embed_target(target), target_mask, memory, source_mask))


def batch(seed: int = 0, rows: int = 4) -> dict[str, Tensor]:
    """Token ids and masks with real padding; the keyword arguments of ``Toy``."""
    draw = torch.Generator().manual_seed(seed)

    def side(length: int) -> tuple[Tensor, Tensor]:
        ends = torch.randint(2, length + 1, (rows, 1), generator=draw)
        return torch.randint(0, VOCAB, (rows, length), generator=draw), torch.arange(length)[None] < ends

    source, source_mask = side(7)
    target, target_mask = side(5)
    return {"source": source, "target": target, "source_mask": source_mask, "target_mask": target_mask}


def masks(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"encoder": inputs["source_mask"], "decoder": inputs["target_mask"]}


def loss_of(model: nn.Module, inputs: Mapping[str, Tensor], tokens: int | None = None) -> Tensor:
    """Cross-entropy per real token (of ``tokens`` where the batch is only a part of what is averaged)."""
    logits, real = model(**inputs), inputs["target_mask"]
    return F.cross_entropy(logits[real], inputs["target"][real], reduction="sum") / (tokens or int(real.sum()))


class ListSink:
    """Keeps what it is given; tables as plain dicts, row by row."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.rows: list[tuple[int, dict[str, float | None], dict[str, Cells]]] = []
        self.closed = 0

    def open(self, tables: Sequence[Table]) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None:
        self.rows.append((step, dict(metrics), dict(tables)))

    def close(self) -> None:
        self.closed += 1

    def row(self, step: int) -> tuple[dict[str, float | None], dict[str, Cells]]:
        return next((metrics, tables) for number, metrics, tables in self.rows if number == step)

    def column(self, step: int, table: str, column: str) -> dict[str, float]:
        """Site -> value."""
        layout, cells = self.tables[table], self.row(step)[1][table]
        values = cells.values[:, layout.columns.index(column)].tolist()
        return dict(zip((row.site for row in layout.rows), values, strict=True))

    def absent(self, step: int, table: str) -> set[str]:
        rows, cells = self.tables[table].rows, self.row(step)[1][table]
        return {row.site for row, absent in zip(rows, cells.absent.tolist(), strict=True) if absent}


def train(
    model: Toy,
    steps: int = 3,
    watch: Callable[[torch.optim.Optimizer], Watcher] | None = None,
    alpha: Callable[[int], float] = lambda t: 1.0,
    accumulate: int = 1,
) -> dict[str, Any]:
    """A training loop with or without a watcher; returns everything that watching must not change."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher = watch(optimizer) if watch else None
    losses = []
    for t in range(steps):
        model.alpha.set(alpha(t))
        total = torch.zeros(())
        for part in range(accumulate):
            loss = loss_of(model, batch(t * accumulate + part)) / accumulate
            loss.backward()
            total = total + loss.detach()
        if watcher:
            watcher.step(loss=total)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    model.alpha.set(alpha(steps))
    if watcher:
        watcher.finish()
        watcher.close()
    return {"losses": losses, "parameters": list(model.parameters()), "rng": torch.get_rng_state()}
