"""A row on its way to the sink: device numbers gathered, copied together, read when they are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
import torch

from ...errors import UsageError
from ...schema import Cells
from ..parameters.layouts import whole
from ..parameters.processes import ALONE, Processes
from ..parameters.ranks import RankShare
from ..rules import EMPTY, Mean, Sum, Total
from .board import Board

Metrics = Mapping[str, float | None]
Aside = Literal["pieces", "clean", "left", "moved", "neutral"]
ONE = np.ones((1, 1), dtype=bool)


class State(Enum):
    """The states of a row. OPEN: numbers are added. OWED: numbers about the update are still to come. SHIPPED: a copy
    to the host is under way. READ: the host has all numbers."""

    OPEN, OWED, SHIPPED, READ = range(4)


@dataclass(frozen=True)
class SetAside:
    """Numbers that are no part of the row but tell where it broke, by kind and name."""

    kind: Aside
    name: str
    values: torch.Tensor

    def finished(self) -> torch.Tensor:
        return self.values


Entry = RankShare | SetAside


@dataclass(frozen=True)
class Shipment:
    """Numbers on their way to the host: their copy, the event that says that it is complete (None: it is), and the
    entries that they belong to, in order."""

    numbers: torch.Tensor
    copied: Any
    sizes: list[tuple[Entry, int]]  # with how many numbers each


class RowRecord:
    """The metrics and tables of one row. ``ship`` starts a device-to-host copy of what was added; ``read`` waits for
    it.

    On several ranks ``ship`` first adds up the numbers of all ranks: every rank must call it before anything is read.
    """

    is_live = True  # the update of this row runs directly or is replayed

    def __init__(self, step: int, device: torch.device, ranks: Processes = ALONE) -> None:
        self.step, self.state = step, State.OPEN
        self.broken: dict[str, np.ndarray] = {}  # table -> (rows, columns) True where a recorded number is not finite
        self.aside: dict[Aside, dict[str, np.ndarray]] = {kind: {} for kind in get_args(Aside)}
        self.ended: set[str] = set()  # tables that ended on some rank
        self._device, self._ranks = device, ranks
        self._metrics: dict[str, float | None] = {}
        self._tables: dict[str, Cells] = {}
        self._entries: list[Entry] = []
        self._shipments: list[Shipment] = []
        self._added: set[str] = set()  # tables

    def has(self, board: Board) -> bool:
        """Return True if the table was added."""
        return board.table.name in self._added

    def owe(self) -> None:
        """Note that more numbers come once all optimizers have stepped."""
        self.state = State.OWED

    def __contains__(self, metric: str) -> bool:
        return metric in self._metrics

    @property
    def waits(self) -> bool:
        """True if other ranks are needed for its numbers."""
        return not self._ranks.alone and any(_common(entry) for entry in self._entries)

    def metric(self, name: str, value: Any, own: bool = False) -> None:
        """Add one number, which is averaged over ranks, or added up if it is a Total. ``own``: True if it stays this
        rank's."""
        if name in self._metrics:
            raise UsageError(f"metric {name!r} stands twice in row {self.step}: rename yours.")
        if name == "step":
            raise UsageError("a metric called 'step' would hide the number of its row: leave it out, or rename it.")
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise UsageError(f"metric {name!r} has shape {tuple(value.shape)}: a metric is one number.")
        own = own or self._ranks.alone
        self._metrics[name] = None if value is None or isinstance(value, (torch.Tensor, Total)) else float(value)
        if isinstance(value, Total):
            total = value
        elif not own:
            total = self._average(value)
        elif isinstance(value, torch.Tensor):
            total = Total(Sum(), self._copy(value))
        else:
            return
        seen = ONE if value is not None else ~ONE
        self._entries.append(RankShare("metric", name, [(total.rule, total.parts)], seen, own=own))

    def table(self, board: Board) -> None:
        """Take the sums of the board, and leave the board empty."""
        self._added.add(board.table.name)
        if self._ranks.alone and board.ended:
            board.clear()
        else:
            self._entries.append(board.take())

    def set_aside(self, kind: Aside, name: str, values: torch.Tensor) -> None:
        """Add numbers that travel with the row for :attr:`aside`; each rank has its own."""
        self._entries.append(SetAside(kind, name, values))

    def share_aside(self, name: str, number: torch.Tensor) -> None:
        """Add a number that travels with the row for ``aside["neutral"]`` and is added up over ranks."""
        self._entries.append(RankShare("aside", name, [(Sum(), number.view(1, 1))], ONE))

    def ship(self) -> None:
        """Start the copy of all that was added since the last copy."""
        if not self._entries:
            return
        if shares := list(filter(_common, self._entries)):
            rest = [entry for entry in self._entries if not _common(entry)]
            self._entries = [*self._ranks.add_up(shares, self._device), *rest]
        numbers, sizes = self._joined()
        self._shipments.append(Shipment(*copied_over(numbers), sizes))
        self._entries, self.state = [], State.SHIPPED

    def adopt(self, template: Template) -> None:
        """Take what the last replay of ``template`` computed."""
        self._metrics |= template.metrics
        numbers, sizes = template.packed
        self._shipments.append(Shipment(*copied_over(numbers if numbers.is_cuda else numbers.clone()), sizes))
        self.state = State.SHIPPED

    def read(self) -> tuple[dict[str, float | None], dict[str, Cells]]:
        """Return the metrics and tables that were added so far; the call waits for the device."""
        if self.waits:
            raise UsageError(
                f"row {self.step} is added up over ranks after the optimizer's step: read its metrics then."
            )
        owed = self.state is State.OWED
        self.ship()
        for shipment in self._shipments:
            if shipment.copied is not None:
                shipment.copied.synchronize()
            numbers, start = shipment.numbers.numpy(), 0
            for entry, size in shipment.sizes:
                values, start = numbers[start : start + size], start + size
                if isinstance(entry, SetAside):
                    self.aside[entry.kind][entry.name] = values
                    continue
                seen = entry.seen
                if entry.flags is not None:
                    values, flags = values[: seen.size], values[seen.size :]
                    seen = flags[:-1].reshape(seen.shape) > 0
                    if flags[-1]:
                        if entry.kind == "table":
                            self.ended.add(entry.name)
                        continue
                grid: Any = values.reshape(seen.shape[1], seen.shape[0]).T
                seen = seen & (grid.view(np.int64) != EMPTY)
                if entry.kind == "metric":
                    self._metrics[entry.name] = float(grid[0, 0]) if seen.all() else None
                    continue
                if entry.kind == "aside":
                    self.aside["neutral"][entry.name] = grid[:, 0]
                    continue
                # missing where nothing was recorded, absent where a whole row is empty
                absent, missing = ~seen.any(axis=1), None if seen.all() else ~seen
                self._tables[entry.name] = Cells(np.where(seen, grid, np.nan), absent, missing)
                if (broken := seen & ~np.isfinite(grid)).any():  # one that was not seen may be 0 / 0: no finding
                    self.broken[entry.name] = broken
        self._shipments.clear()
        self.state = State.OWED if owed else State.READ
        return self._metrics, self._tables

    def state_dict(self) -> dict[str, Any]:
        metrics, tables = self.read()
        packed = {
            n: [torch.from_numpy(array) for array in (c.values, c.absent, c.missing) if array is not None]
            for n, c in tables.items()
        }
        broken = {name: torch.from_numpy(cells) for name, cells in self.broken.items()}
        aside = {k: {n: torch.from_numpy(values) for n, values in named.items()} for k, named in self.aside.items()}
        return {"step": self.step, "metrics": dict(metrics), "tables": packed, "broken": broken, "aside": aside}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowRecord:
        row = cls(state["step"], torch.device("cpu"))
        row._metrics = dict(state["metrics"])
        row.broken = {name: cells.numpy() for name, cells in state["broken"].items()}
        row._tables = {n: Cells(*(array.numpy() for array in arrays)) for n, arrays in state["tables"].items()}
        for kind, named in state["aside"].items():
            if isinstance(named, torch.Tensor):  # a checkpoint of an older version, of "kind name"
                kind, named = kind.split(" ", 1)[0], {kind.split(" ", 1)[1]: named}
            row.aside[kind] |= {name: values.numpy() for name, values in named.items()}
        return row

    def _joined(self) -> tuple[torch.Tensor, list[tuple[Entry, int]]]:
        """Return the finished numbers of all entries in one tensor, and how many each entry has."""
        finished = [entry.finished() for entry in self._entries]
        sizes = [(entry, part.numel()) for entry, part in zip(self._entries, finished, strict=True)]
        return torch.cat(finished), sizes

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        return whole(value.detach()).reshape(1, 1).to(self._device, torch.float64, copy=True)

    def _average(self, value: torch.Tensor | float | None) -> Total:
        """Return the sum and count of a number; None adds neither. A host number reaches the device by fills, which
        wait for nothing."""
        parts = torch.zeros(1, 2, dtype=torch.float64, device=self._device)
        if value is not None:
            parts[:, 1] = 1.0
            parts[:, 0] = self._copy(value)[0] if isinstance(value, torch.Tensor) else float(value)
        return Total(Mean(), parts)


class Template(RowRecord):
    """A row that is computed over and over by replays of what was recorded: all its numbers stay in one tensor.

    ``step``: the row at which it was recorded. Rows that are replayed with it are probed if and only if this row is.
    """

    is_live = False  # the update is recorded and does not run

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def ship(self) -> None:
        """Leave all numbers to :meth:`pack`, which sends them together."""

    def pack(self) -> None:
        """Pack all numbers into one tensor; this is the last thing that is recorded."""
        self.packed = self._joined()


class RowMetrics(Metrics):
    """The metrics of a row, read from the device at the first access. That access waits for the device, so make it
    late, or never."""

    def __init__(self, row: RowRecord) -> None:
        self._row = row

    def __getitem__(self, name: str) -> float | None:
        return self._row.read()[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row.read()[0])

    def __len__(self) -> int:
        return len(self._row.read()[0])

    def __repr__(self) -> str:
        return repr(self._row.read()[0])


def _common(entry: Entry) -> TypeGuard[RankShare]:
    """Return True if it is a part of what several ranks add up."""
    return isinstance(entry, RankShare) and not entry.own


def copied_over(numbers: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return ``numbers`` on their way to the host, and the event that says that they are there (None: they are)."""
    if not numbers.is_cuda:
        return numbers, None
    stream = torch.cuda.current_stream(numbers.device)  # which need not be the current device
    numbers = numbers.to("cpu", non_blocking=True)  # into pinned memory, behind the step's own kernels
    event = torch.cuda.Event()
    event.record(stream)
    return numbers, event
