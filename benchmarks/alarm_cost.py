#!/usr/bin/env python
"""What the alarm costs a row: its own processor time, beside that of an update of the same model.

    OMP_NUM_THREADS=1 python benchmarks/alarm_cost.py

A row of the default probes, ``adam`` and ``attention_heads``; the median of 200 rows. The alarm's time depends on the
number of places alone, an update's on everything else: in a model that people train the share is smaller than here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from timing import Nowhere
from torch import nn

from stabilitylab.alarm import Alarm
from stabilitylab.probes import Watcher

WIDTH, TOKENS, SENTENCES = 128, 64, 4


class Keeps(Nowhere):
    """A sink that keeps the last row."""

    def open(self, tables: object) -> None:
        self.tables = tables

    def append(self, *row: object) -> None:
        self.row = row


def times(action: Callable[[], object], count: int) -> float:
    """Median processor time in microseconds."""
    found = []
    for _ in range(count):
        start = time.process_time()
        action()
        found.append(1e6 * (time.process_time() - start))
    return statistics.median(found)


def cost(layers: int) -> dict[str, object]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(SENTENCES, TOKENS, WIDTH)
    sink = Keeps()

    def update() -> None:
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = times(update, 5)
    names = ["default", "adam", "attention_heads"]
    with Watcher(model, sink, probes=names, every=1, update_every=50, optimizer=optimizer) as watcher:
        for _ in range(3):
            loss = (model(x) ** 2).mean()
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
        watcher.flush()
        alarm = Alarm()
        alarm.open(sink.tables)
        step, metrics, tables = sink.row
        own = times(lambda: alarm.observe(step, metrics, tables), 200)
    places = sum(len(cells.absent) for cells in tables.values())
    return {"layers": layers, "places": places, "alarm, us": f"{own:.0f}", "share of an update": f"{own / plain:.4f}"}


if __name__ == "__main__":
    found = [cost(layers) for layers in (4, 12, 24)]
    print("| " + " | ".join(found[0]) + " |\n" + "|---:" * len(found[0]) + "|")
    for line in found:
        print("| " + " | ".join(map(str, line.values())) + " |")
