"""A loop of somebody's own, under watch with an alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import stabilitylab as sl
from stabilitylab.alarm import Alert


class Loop:
    """A small model and its optimizer; a batch at ``bad`` is 1e4 times as bad, the rate at ``fast`` 1e5; ``seed``
    draws the batches."""

    def __init__(self, bad: int = -1, fast: int = -1, seed: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.bad, self.fast, self.seed = bad, fast, seed

    def run(self, w: Any, first: int, last: int) -> None:
        for step in range(first, last):
            random = torch.Generator().manual_seed(step + 10_000 * self.seed)
            x = torch.randn(4, 5, 8, generator=random)
            loss = (self.model(x) ** 2).mean() * (1e4 if step == self.bad else 1.0)
            loss.backward()
            w.step(loss=loss)
            self.optimizer.param_groups[0]["lr"] = 1e5 if step == self.fast else 1e-3
            self.optimizer.step()
            self.optimizer.zero_grad()


def watched(out: Path, loop: Loop, steps: int = 60, **options: Any) -> list[Alert]:
    with sl.watch(loop.model, out=out, every=1, optimizer=loop.optimizer, **options) as w:
        loop.run(w, 0, steps)
    assert w.alarm is not None
    return w.alarm.alerts
