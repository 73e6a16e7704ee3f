"""A small Transformer of anybody's, trained under watch() with a fault at one step; and runs with made-up numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.diagnose import Diagnosis, Event, diagnose
from stabilitylab.probes import PROBES
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

VOCAB, WIDTH = 17, 16
Fault = Callable[[int, "Copier", torch.optim.Optimizer], None]


class Layer(nn.Module):
    def __init__(self, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.attn, self.norm1 = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        if self.pre:
            h = self.norm1(x)
            x = x + self.attn(h, h, h, need_weights=False)[0]
            return x + self.linear2(F.relu(self.linear1(self.norm2(x))))
        x = self.norm1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class Copier(nn.Module):
    """Names the token that it sees; Post-LN or Pre-LN. ``skipped``: layers (from 0) that the forward leaves out."""

    skipped: frozenset[int] = frozenset()

    def __init__(self, layers: int = 4, pre: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(pre) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.embedding(tokens)
        for n, layer in enumerate(self.layers):
            if n not in self.skipped:
                x = layer(x)
        return self.head(self.norm(x))


def train(
    out: Path,
    *,
    fault: Fault | None = None,
    every: int | str = 1,
    steps: int = 60,
    rate: Callable[[int], float] = lambda t: 3e-3,
    sgd: bool = False,
    pre: bool = False,
    seed: int = 0,
    layers: int = 4,
    record: Any = None,
    parts: Callable[[int], int] = lambda t: 1,
    anew: Callable[[int], float | None] = lambda t: None,
    lr_given: bool = True,
) -> Path:
    """A watched run at ``out``; ``fault`` is called before each step's forward pass; ``parts``: micro-batches.

    ``anew``: the rate of another optimizer that steps in the place of the given one, None where the given one steps.
    ``lr_given``: the rate is a metric too.
    """
    model = Copier(layers, pre, seed)
    made = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = made(model.parameters(), lr=rate(0))
    other = made(model.parameters(), lr=rate(0))
    draw = torch.Generator().manual_seed(seed)
    fixed = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(99))

    def reference() -> None:
        model(fixed)

    with sl.watch(model, out=out, every=every, optimizer=optimizer, reference=reference, record=record) as watcher:
        for t in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(t)
            if fault is not None:
                fault(t, model, optimizer)
            for _ in range(parts(t)):
                tokens = torch.randint(VOCAB, (8, 6), generator=draw)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
            watcher.step(loss=loss, **({"lr": rate(t)} if lr_given else {}))
            instead = anew(t)
            if instead is None:
                optimizer.step()
            else:
                other.param_groups[0]["lr"] = instead
                other.step()
            optimizer.zero_grad()
    return out


def found(path: Path) -> Diagnosis:
    return diagnose(Run.open(path))


def only(diagnosis: Diagnosis, kind: str) -> Event:
    """The one event of this kind, or the first of them."""
    events = [event for event in diagnosis.events if event.kind == kind]
    assert events, f"no {kind}, but {[event.kind for event in diagnosis.events]}"
    return events[0]


def kinds(diagnosis: Diagnosis) -> set[str]:
    return {event.kind for event in diagnosis.events}


def layer_rows(layers: int, stack: str = "encoder") -> list[Row]:
    return [Row(f"{stack}.{n}", stack, n, "ffn") for n in range(1, layers + 1)]


@dataclass(frozen=True)
class Made:
    """A made-up table: ``values`` maps a step to (rows, columns); NaN rows named in ``absent`` have no gradient."""

    rows: Sequence[Row]
    columns: Sequence[str]
    values: Callable[[int], Any]
    steps: Sequence[int]
    total: str = ""
    absent: Callable[[int, Row], bool] = lambda step, row: False


def defined(name: str, made: Made) -> Table:
    """With the facts of the probe of that name, where there is one with these columns."""
    if name in PROBES and {*made.columns} <= {*PROBES[name].columns}:
        return replace(PROBES[name].table(made.rows, made.columns), total=made.total)
    return Table(name, tuple(made.columns), tuple(made.rows), total=made.total)


def made(
    path: Path,
    metrics: Mapping[str, Sequence[float | None]] | None = None,
    tables: Mapping[str, Made] | None = None,
    steps: Sequence[int] | None = None,
    **facts: Any,
) -> Path:
    """A finished run; metrics are one number a step, from step 0 on or at ``steps``."""
    metrics, tables = metrics or {}, tables or {}
    count = max((len(values) for values in metrics.values()), default=0)
    at = list(steps) if steps is not None else list(range(count))
    every = sorted({*at, *(step for table in tables.values() for step in table.steps)})
    with RunWriter.create(path, {"label": "made", "config": {}, **facts}) as run:
        run.open([defined(name, table) for name, table in tables.items()])
        for step in every:
            numbers = {name: values[at.index(step)] for name, values in metrics.items() if step in at}
            cells = {}
            for name, table in tables.items():
                if step in table.steps:
                    values = np.asarray(table.values(step), float).reshape(len(table.rows), len(table.columns))
                    cells[name] = Cells(values, np.array([table.absent(step, row) for row in table.rows]))
            run.append(step, numbers, cells)
        run.set_status("finished", every[-1])
    return path


def falling(steps: int, noise: float = 0.02, seed: int = 0) -> list[float]:
    """A loss that learns: 2 exp(-t / 20) + 1, with normal noise."""
    t = np.arange(steps)
    return (2 * np.exp(-t / 20) + 1 + noise * np.random.default_rng(seed).standard_normal(steps)).tolist()
