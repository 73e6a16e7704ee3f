"""Boards, on which a row's numbers add up: additive float64 numbers on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import UsageError
from ...schema import Row
from ..base import Collected, Probe
from ..parameters.ranks import RankShare
from ..parameters.squares import PATTERNS
from ..places.sites import Site
from .masks import Masks


class Apart(NamedTuple):
    """The sums and maxima of one pass, (rows, width) for each column, and which cells exist."""

    parts: dict[str, torch.Tensor]
    seen: np.ndarray


class Board:
    """The numbers of one probe for one row: views of shared buffers, (rows, width) for each column.

    Numbers from hooks wait, one small tensor each, until ``reduce`` adds equal shapes up in a few operators.
    """

    def __init__(self, probe: Probe, rows: Sequence[Row], columns: Sequence[str], sites: Sequence[Site] = ()) -> None:
        self.probe = probe
        self.sites = sites
        self.table = probe.table(rows, columns)
        self.rules = {column: probe.columns[column] for column in columns}
        self.parts: dict[str, torch.Tensor] = {}
        self.ended = ""  # the reason why the table gets no more numbers
        self._left_out: list[int] = []  # rows that get no numbers
        self._storage: dict[bool, torch.Tensor] = {}  # of its sums (True) and of its maxima
        self._waiting: dict[str, list[tuple[int, torch.Tensor, torch.Tensor | None]]] = {}
        self._values: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        self._index: dict[tuple[int, ...], torch.Tensor] = {}
        self._apart: dict[int, Apart] = {}  # number of a pass that has had no backward yet -> its sums
        self._spoilt = False  # this row's numbers depend on passes that were thrown away
        self._seen = np.zeros((len(rows), len(columns)), dtype=bool)
        self._readers: dict[str, list[tuple[int, str]]] = {}  # raw number -> the columns that read it
        for place, column in enumerate(columns):
            self._readers.setdefault(self.reads(column), []).append((place, column))

    @property
    def main(self) -> str:
        """The raw number that a lone tensor from ``measure`` is."""
        return self.reads(next(iter(self.rules)))

    def reads(self, column: str) -> str:
        return self.rules[column].of or column

    def place(self, additive: bool, buffer: torch.Tensor) -> None:
        """Place the columns that are sums, or maxima, in ``buffer``, one after the other."""
        self._storage[additive] = buffer
        self.parts |= self._columns_in(additive, buffer)

    def _columns_in(self, additive: bool, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the columns that are sums, or maxima, as views of a buffer that holds them one after the other."""
        columns = {column: rule.width for column, rule in self.rules.items() if rule.additive is additive}
        parts = buffer.split([len(self.table.rows) * width for width in columns.values()])
        return {column: part.view(-1, width) for (column, width), part in zip(columns.items(), parts, strict=True)}

    def hold(self, raw: str, row: int, value: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Keep a number, or one number per token, until the pass ends. ``weight``: the weight of each token, if it is
        not that of the pass which ends, as for a gradient that comes after another forward."""
        self._waiting.setdefault(raw, []).append((row, value, weight))

    def hold_value(self, raw: str, row: int, value: torch.Tensor) -> None:
        """Keep a value that is measured later, with others of its shape. Nothing may write to it until then."""
        key = raw, self.sites[row].mask, value.shape, value.dtype
        rows, values = self._values.setdefault(key, ([], []))
        rows.append(row)
        values.append(value.detach())

    def drop(self) -> None:
        """Forget what waits to be added up."""
        self.probe.end_pass(kept=False)
        self._waiting.clear()
        self._values.clear()

    def reduce(self, masks: Masks) -> None:
        """Add what waits to the columns, equal shapes of one stack together."""
        self._add_up(masks)
        self._values.clear()
        self._waiting.clear()
        self.probe.end_pass(kept=True)

    def reduce_apart(self, masks: Masks, number: int) -> None:
        """Add what waits to sums of the pass of this ``number``, which :meth:`join` adds to the columns."""
        apart = self._apart.get(number)
        if apart is None or len(apart.seen) < len(self._seen):  # places were found since
            parts = {c: torch.full_like(p, 0 if self.rules[c].additive else -torch.inf) for c, p in self.parts.items()}
            own = self._apart[number] = Apart(parts, np.zeros_like(self._seen))
            self._add_apart(apart, own)
            apart = own
        before = self.parts, self._seen
        self.parts, self._seen = apart
        try:
            self.reduce(masks)
        finally:
            self.parts, self._seen = before

    def join(self, number: int) -> None:
        """Add the sums of a pass that stand apart, if any do, to the columns."""
        self._add_apart(self._apart.pop(number, None), Apart(self.parts, self._seen))

    def _add_apart(self, apart: Apart | None, into: Apart) -> None:
        """Add sums, if there are any, to others, which may have more places."""
        for column, values in ({} if apart is None else apart.parts).items():
            own = into.parts[column][: len(values)]
            own.add_(values) if self.rules[column].additive else torch.maximum(own, values, out=own)
        if apart is not None:
            into.seen[: len(apart.seen)] |= apart.seen

    def leave_out_apart(self, number: int) -> None:
        """Leave out the sums of a pass that stand apart, if any do."""
        if self._apart.pop(number, None) is not None:
            self._note_spoilt()

    def forget_joined(self) -> None:
        """Forget the passes in the columns. Keep those that stand apart, and the numbers that wait."""
        self._note_spoilt()
        self._seen[:] = False
        for additive, buffer in self._storage.items():
            buffer.fill_(0 if additive else -torch.inf)

    def _note_spoilt(self) -> None:
        """Note that a pass is left out: a probe that counts through the passes of a row has counted it."""
        self._spoilt |= type(self.probe).begin_row is not Probe.begin_row

    def _add_up(self, masks: Masks) -> None:
        for (raw, stack, shape, _), (rows, values) in self._values.items():
            numbers = self.probe.measure_together(values)
            self.add(raw, rows, numbers, masks(stack, shape[:-1], numbers.device) if numbers.dim() > 1 else None)
        for raw, entries in self._waiting.items():
            if raw not in self._readers:
                measured = f"probe {self.table.name!r} measures {raw!r}"
                raise UsageError(f"{measured}, but its columns read {', '.join(map(repr, sorted(self._readers)))}.")
            groups: dict[tuple[str | None, torch.Size, int], tuple[list[int], list[torch.Tensor], Any]] = {}
            for row, value, weight in entries:
                stack = self.sites[row].mask if value.dim() else None
                own = weight if value.dim() and weight is not None and weight.shape == value.shape else None
                rows, values, _ = groups.setdefault((stack, value.shape, id(own)), ([], [], own))
                rows.append(row)
                values.append(value)
            for (stack, shape, _), (rows, values, own) in groups.items():
                stacked = torch.stack(values)  # (n, *tokens)
                if shape and own is None:
                    own = masks(stack, shape, stacked.device)
                self.add(raw, rows, stacked, own)

    def add(self, raw: str, rows: Sequence[int], values: torch.Tensor, weight: torch.Tensor | None) -> None:
        if (index := self._index.get(key := tuple(rows))) is None:
            index = torch.tensor(rows, device=values.device)
            if len(self._index) < PATTERNS:
                self._index[key] = index
        for place, column in self._readers.get(raw, ()):
            self.rules[column].add(self.parts[column], index, values, weight)
            self._seen[rows, place] = True

    def extend(self, sites: Sequence[Site]) -> None:
        """Add places that were found while the first row is measured; :func:`lay_out_anew` then makes room."""
        self.sites = (*self.sites, *sites)
        self.table = replace(self.table, rows=(*self.table.rows, *(site.row for site in sites)))
        self._seen = np.pad(self._seen, ((0, len(sites)), (0, 0)))

    def collect(self, collected: Collected) -> None:
        """Add the numbers of all rows at once, from a probe of parameters."""
        for column, values in collected.columns.items():
            own = self.parts[column]
            own.add_(values) if self.rules[column].additive else torch.maximum(own, values, out=own)
        self._seen |= collected.seen

    def take(self) -> RankShare:
        """Return what was added up, before its rules finish it, and for which cells; then begin anew."""
        held: dict[str, torch.Tensor] = {}
        for additive, buffer in self._storage.items():
            held |= self._columns_in(additive, buffer.clone())
        columns = [(rule, held[column]) for column, rule in self.rules.items()]
        seen = np.zeros_like(self._seen) if self._spoilt else self._seen.copy()
        seen[self._left_out] = False
        share = RankShare("table", self.table.name, columns, seen, ended=bool(self.ended), copies=bool(self.sites))
        self.clear()
        return share

    def forget(self) -> np.ndarray:
        """Return the cells that have a number, and forget that they have."""
        seen = self._seen.copy()
        self._seen[:] = False
        return seen

    def recall(self, seen: np.ndarray) -> None:
        """Note that a replay has filled the columns for these cells."""
        self._seen |= seen

    def leave_out(self, rows: Sequence[int], why: str) -> None:
        """Leave these rows out from now on, with the numbers that they have in the row of the run that is open."""
        self._left_out = [*self._left_out, *rows]
        self.probe.missed |= {self.sites[row].name: why for row in rows}

    def end(self, why: str) -> None:
        """End the table for this reason: from now on it stays empty."""
        self.ended = why
        self.clear()

    def clear(self) -> None:
        self.drop()
        self.probe.begin_row()
        self._apart.clear()
        self._spoilt = False
        self._seen[:] = False
        for additive, buffer in self._storage.items():
            buffer.fill_(0 if additive else -torch.inf)


def allocate(boards: Sequence[Board], device: torch.device) -> torch.Tensor:
    """Make one float64 buffer for all sums and one for all maxima; return the one for sums."""
    buffer = _placed(boards, device)
    for board in boards:
        board.clear()
    return buffer


def lay_out_anew(boards: Sequence[Board], device: torch.device, clean: CleanPasses | None) -> None:
    """Make larger buffers after sites were added, and copy the numbers of the boards so far."""
    old = [(board, column, part) for board in boards for column, part in board.parts.items()]
    buffer = _placed(boards, device)
    for board in boards:
        for column, part in board.parts.items():
            part.fill_(0 if board.rules[column].additive else -torch.inf)
    moved = [(board.rules[column].additive, part, board.parts[column][: len(part)]) for board, column, part in old]
    for _, before, now in moved:
        now.copy_(before)
    if clean is not None:
        clean.follow(buffer, [(before, now) for additive, before, now in moved if additive])


def _placed(boards: Sequence[Board], device: torch.device) -> torch.Tensor:
    buffer = torch.empty(0)
    for additive in (False, True):
        widths = [sum(rule.width for rule in board.rules.values() if rule.additive is additive) for board in boards]
        sizes = [len(board.table.rows) * width for board, width in zip(boards, widths, strict=True)]  # 0 for no rows
        buffer = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        for board, width, piece in zip(boards, widths, buffer.split(sizes), strict=True):
            if width:
                board.place(additive, piece)
    return buffer


class CleanPasses:
    """The number of micro-batches of a row that left each number finite: two operator calls for each but the last."""

    def __init__(self, sums: torch.Tensor) -> None:
        self._sums, self._clean = sums, torch.zeros(sums.shape, dtype=torch.int16, device=sums.device)
        self.passes = 0

    def follow(self, sums: torch.Tensor, moved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Follow the sums to a new buffer. ``moved``: where they were and where they are. New sums count as finite so
        far."""
        before, self._sums = self._clean, sums
        self._clean = torch.full(sums.shape, self.passes, dtype=torch.int16, device=sums.device)
        for old, new in moved:
            self._piece(self._clean, new).copy_(self._piece(before, old))

    @staticmethod
    def _piece(counts: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        return counts[parts.storage_offset() :][: parts.numel()]

    def begin(self) -> None:
        """Begin the row anew."""
        self._clean.zero_()
        self.passes = 0

    def count(self) -> None:
        self._clean.add_(self._sums.isfinite())
        self.passes += 1

    def take(self, boards: Sequence[Board]) -> Mapping[str, torch.Tensor]:
        """Return the counts by table, (rows,), and begin anew. The result is empty if there was one micro-batch."""
        if not self.passes:
            return {}
        taken = {}
        for board in boards:
            parts = next((p for c, p in board.parts.items() if board.rules[c].additive), None)
            if parts is not None:
                piece = self._piece(self._clean, parts)
                taken[board.table.name] = piece.view(parts.shape).amin(dim=1).double()
        self.begin()
        return taken
