"""A row on its way to the sink: device numbers gathered, copied together, read when they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from ..schema import Cells
from .accumulate import cells

Metrics = Mapping[str, float | None]


class Record:
    """Metrics and tables of one row. ``ship`` starts a device-to-host copy of what was added; ``read`` waits for it."""

    def __init__(self, step: int, device: torch.device) -> None:
        self.step = step
        self._device = device
        self._metrics: dict[str, float | None] = {}
        self._tables: dict[str, Cells] = {}
        self._queue: list[tuple[str, torch.Tensor, np.ndarray | None]] = []  # a metric has no grid of seen cells
        self._shipped: list[tuple[torch.Tensor, Any, list[tuple[str, torch.Tensor, np.ndarray | None]]]] = []

    def __contains__(self, metric: str) -> bool:
        return metric in self._metrics

    def metric(self, name: str, value: Any) -> None:
        if name in self._metrics:
            raise UsageError(f"metric {name!r} stands twice in row {self.step}: rename yours.")
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise UsageError(f"metric {name!r} has shape {tuple(value.shape)}: a metric is one number.")
            number = value.detach().reshape(1).to(self._device, torch.float64, copy=True)
            self._queue.append((name, number, None))
        self._metrics[name] = None if value is None or isinstance(value, torch.Tensor) else float(value)

    def table(self, name: str, values: torch.Tensor, seen: np.ndarray) -> None:
        self._queue.append((name, values, seen))

    def ship(self) -> None:
        if self._queue:
            host, copied = torch.cat([values for _, values, _ in self._queue]), None
            if host.is_cuda:
                host = host.to("cpu", non_blocking=True)  # into pinned memory, behind the step's own kernels
                copied = torch.cuda.Event()
                copied.record()
            self._shipped.append((host, copied, self._queue))
            self._queue = []

    def read(self) -> tuple[dict[str, float | None], dict[str, Cells]]:
        self.ship()
        for host, copied, queue in self._shipped:
            if copied is not None:
                copied.synchronize()
            numbers, start = host.numpy(), 0
            for name, values, seen in queue:
                piece = numbers[start : (start := start + values.numel())]
                if seen is None:
                    self._metrics[name] = float(piece[0])
                else:
                    self._tables[name] = cells(piece, seen)
        self._shipped.clear()
        return self._metrics, self._tables

    def state_dict(self) -> dict[str, Any]:
        metrics, tables = self.read()
        packed = {n: (torch.from_numpy(c.values), torch.from_numpy(c.absent)) for n, c in tables.items()}
        return {"step": self.step, "metrics": dict(metrics), "tables": packed}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Record:
        record = cls(state["step"], torch.device("cpu"))
        record._metrics = dict(state["metrics"])
        record._tables = {n: Cells(values.numpy(), absent.numpy()) for n, (values, absent) in state["tables"].items()}
        return record


class RowMetrics(Metrics):
    """A row's metrics on the host, read when first looked at: that waits for the device, so look late, or not."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __getitem__(self, name: str) -> float | None:
        return self._record.read()[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record.read()[0])

    def __len__(self) -> int:
        return len(self._record.read()[0])

    def __repr__(self) -> str:
        return repr(self._record.read()[0])
