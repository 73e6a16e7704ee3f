"""A row on its way to the sink: device numbers gathered, copied together, read when they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from ...errors import UsageError
from ...schema import Cells
from ..parameters.ranks import Ranks, RankShare
from ..rules import EMPTY, Mean, Total
from .board import Board, cells

Metrics = Mapping[str, float | None]
Seen = np.ndarray | tuple[int, int] | Literal["aside"] | None  # cells, or of ranks their shape; a metric has none
Entry = tuple[str, torch.Tensor, Seen]


class RowRecord:
    """Metrics and tables of one row. ``ship`` starts a device-to-host copy of what was added; ``read`` waits for it.

    On several ranks ``ship`` first adds up what they have: each rank must come to it, and nothing is read before.
    """

    def __init__(self, step: int, device: torch.device, ranks: Ranks | None = None) -> None:
        self.step = step
        self._device, self._ranks = device, ranks
        self._metrics: dict[str, float | None] = {}
        self._tables: dict[str, Cells] = {}
        self._shares: list[RankShare] = []  # what ranks have to add up
        self._queue: list[Entry] = []
        self.aside: dict[str, np.ndarray] = {}  # numbers that are no part of the row but tell where it broke
        self.broken: dict[str, np.ndarray] = {}  # table -> (rows, columns) True where a recorded number is not finite
        self._shipped: list[tuple[torch.Tensor, Any, list[Entry]]] = []

    def __contains__(self, metric: str) -> bool:
        return metric in self._metrics

    def metric(self, name: str, value: Any, own: bool = False) -> None:
        """One number, averaged over ranks, or if it is a Total added up; ``own``: it stays this rank's."""
        if name in self._metrics:
            raise UsageError(f"metric {name!r} stands twice in row {self.step}: rename yours.")
        self._metrics[name] = None
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise UsageError(f"metric {name!r} has shape {tuple(value.shape)}: a metric is one number.")
        if self._ranks is not None and not own:
            total = value if isinstance(value, Total) else self._average(value)
            seen = np.full((1, 1), value is not None)
            self._shares.append(RankShare(name, [(total.rule, total.parts)], seen, metric=True))
        elif isinstance(value, Total):
            self._queue.append((name, value.finish().reshape(1), None))
        elif isinstance(value, torch.Tensor):
            self._queue.append((name, self._copy(value), None))
        else:
            self._metrics[name] = None if value is None else float(value)

    def table(self, board: Board) -> None:
        """What the board has added up, which is empty then."""
        if self._ranks is None:
            self._queue.append((board.table.name, *board.take()))
        else:
            self._shares.append(RankShare(board.table.name, *board.hand_over()))

    def set_aside(self, name: str, values: torch.Tensor) -> None:
        """Numbers that travel with the row for :attr:`aside`; of several ranks each has its own."""
        self._queue.append((name, values, "aside"))

    @property
    def waits(self) -> bool:
        """Whether other ranks are needed for its numbers."""
        return bool(self._shares)

    def ship(self) -> None:
        if self._shares and self._ranks is not None:
            for whole in self._ranks.add_up(self._shares, self._device):
                self._queue.append((whole.name, whole.values, None if whole.metric else whole.shape))
            self._shares = []
        if self._queue:
            self._copy_over(torch.cat([values for _, values, _ in self._queue]), self._queue)
            self._queue = []

    def adopt(self, template: Template) -> None:
        """What the last replay of ``template`` computed."""
        self._metrics |= template.metrics
        numbers, queue = template.packed
        self._copy_over(numbers if numbers.is_cuda else numbers.clone(), queue)

    def _copy_over(self, numbers: torch.Tensor, queue: list[Entry]) -> None:
        copied = None
        if numbers.is_cuda:
            stream = torch.cuda.current_stream(numbers.device)  # which need not be the current device
            numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory, behind the step's own kernels
            copied = torch.cuda.Event()
            copied.record(stream)
        self._shipped.append((numbers, copied, queue))

    def read(self) -> tuple[dict[str, float | None], dict[str, Cells]]:
        if self.waits:
            raise UsageError(
                f"row {self.step} is added up over ranks after the optimizer's step: read its metrics then."
            )
        self.ship()
        for host, copied, queue in self._shipped:
            if copied is not None:
                copied.synchronize()
            numbers, start = host.numpy(), 0
            for name, values, seen in queue:
                piece = numbers[start : (start := start + values.numel())]
                if seen is None:  # of ranks, behind it, how many had it
                    given = piece[-1] or (piece.size == 1 and piece.view(np.int64)[0] != EMPTY)
                    self._metrics[name] = float(piece[0]) if given else None
                elif isinstance(seen, str):
                    self.aside[name] = piece
                elif isinstance(seen, tuple):
                    piece, ranks = np.split(piece, 2)
                    self._take(name, piece, ranks.reshape(seen) > 0)
                else:
                    self._take(name, piece, seen)
        self._shipped.clear()
        return self._metrics, self._tables

    def _take(self, name: str, values: np.ndarray, seen: np.ndarray) -> None:
        if (nothing := values.view(np.int64) == EMPTY).any():
            seen = seen & ~nothing.reshape(seen.shape[1], seen.shape[0]).T
        self._tables[name] = cells(values, seen)
        if not np.isfinite(values).all():  # a cell that was not seen may be 0 / 0, which is no finding
            broken = seen & ~np.isfinite(self._tables[name].values)
            if broken.any():
                self.broken[name] = broken

    def state_dict(self) -> dict[str, Any]:
        metrics, tables = self.read()
        packed = {
            n: [torch.from_numpy(array) for array in (c.values, c.absent, c.missing) if array is not None]
            for n, c in tables.items()
        }
        broken = {name: torch.from_numpy(cells) for name, cells in self.broken.items()}
        aside = {name: torch.from_numpy(values) for name, values in self.aside.items()}
        return {"step": self.step, "metrics": dict(metrics), "tables": packed, "broken": broken, "aside": aside}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowRecord:
        record = cls(state["step"], torch.device("cpu"))
        record._metrics = dict(state["metrics"])
        record.broken = {name: cells.numpy() for name, cells in state["broken"].items()}
        record.aside = {name: values.numpy() for name, values in state["aside"].items()}
        record._tables = {n: Cells(*(array.numpy() for array in arrays)) for n, arrays in state["tables"].items()}
        return record

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().reshape(1).to(self._device, torch.float64, copy=True)

    def _average(self, value: torch.Tensor | float | None) -> Total:
        """Sum and count; None adds neither. A host number reaches the device by fills, which wait for nothing."""
        parts = torch.zeros(1, 2, dtype=torch.float64, device=self._device)
        if value is not None:
            parts[:, 1] = 1.0
            parts[:, 0] = self._copy(value) if isinstance(value, torch.Tensor) else float(value)
        return Total(Mean(), parts)


class Template(RowRecord):
    """A row that is computed over and over by replays of what was recorded: all its numbers stay in one tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def ship(self) -> None:
        """Does nothing: :meth:`pack` sends all numbers together."""

    def pack(self) -> None:
        """Packs all numbers into one tensor; this is the last thing that is recorded."""
        self.packed = torch.cat([values for _, values, _ in self._queue]), self._queue


class RowMetrics(Metrics):
    """A row's metrics on the host, read when first looked at: that waits for the device, so look late, or not."""

    def __init__(self, record: RowRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> float | None:
        return self._record.read()[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record.read()[0])

    def __len__(self) -> int:
        return len(self._record.read()[0])

    def __repr__(self) -> str:
        return repr(self._record.read()[0])
