"""The signals of a row, one row after the other, with the past of each place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np

from ..decisive import decisive
from ..schema import Cells, Row, Table
from .lowest import Lowest
from .past import Past
from .signal import OVER_LOWEST, Places, Signal, signals

KEPT = 25  # rows for which a reading counts if no newer one comes: some tables have fewer rows


class Reading(NamedTuple):
    """A signal's value in a row, and its place."""

    value: float
    place: Row | None = None


class Signals:
    """Turns rows into the readings of all signals (:class:`~.signal.Signal`), and keeps the past of each place.

    A number that a row does not hold keeps its last value for 25 rows, and is left out after that. A past is counted in
    rows, so rows should have one distance. Levels that are not decisive (an eigenvalue that has not converged, a
    critical rate that is a bound or noise) are not read (:mod:`stabilitylab.decisive`).
    """

    def __init__(self) -> None:
        self._signals = signals()
        self._pasts: dict[str, Past] = {}
        self._lowest: dict[str, Lowest] = {}
        self._tables: dict[str, Table] = {}
        self._last: dict[str, tuple[int, Reading]] = {}  # reading -> number of its row, value and place
        self._row = 0

    def open(self, tables: Sequence[Table]) -> None:
        self._tables = {table.name: table for table in tables}

    def read(
        self, metrics: Mapping[str, float | None], tables: Mapping[str, Cells], *, more: bool = False
    ) -> dict[str, Reading]:
        """Return the readings of this row, and add the row to the pasts; ``more``: these are the rest of the last
        row."""
        self._row += not more
        told: dict[str, Reading] = {}
        for signal in self._signals:
            told.update(self._read(signal, metrics, tables))
        self._last.update({name: (self._row, reading) for name, reading in told.items()})
        return {name: reading for name, (row, reading) in self._last.items() if self._row - row < KEPT}

    def _read(
        self, signal: Signal, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]
    ) -> Iterator[tuple[str, Reading]]:
        places: Places = [None]
        cells = tables.get(signal.table) if signal.table else None
        if cells is not None:
            values, places = self._column(signal.table, signal.column, cells), self._tables[signal.table].rows
        elif not signal.table and (number := metrics.get(signal.column)) is not None:
            values = np.array([number], dtype=float)
        else:
            return
        if "level" in signal.kinds:
            decided = values if cells is None else self._settled(signal.table, signal.column, cells)
            yield from _level(signal, *signal.take(decided, places))
        if signal.is_compared:
            yield from self._compared(signal, *signal.take(values, places))
        if signal.is_over_lowest:
            yield from self._over_lowest(signal, *signal.take(values, places))

    def _column(self, table: str, column: str, cells: Cells) -> np.ndarray:
        """Return a column, (places,), NaN where there is no number; all NaN if the table has no such column."""
        columns = self._tables[table].columns
        if column not in columns:
            return np.full(len(cells.absent), np.nan)
        return np.where(cells.absent, np.nan, cells.values[:, columns.index(column)])

    def _settled(self, table: str, column: str, cells: Cells) -> np.ndarray:
        """Return a column, NaN where the number is not decisive."""
        columns = self._tables[table].columns
        chosen = decisive(table, column, lambda name: self._column(table, name, cells) if name in columns else None)
        values = self._column(table, column, cells)
        return values if chosen is None else np.where(chosen, values, np.nan)

    def _compared(self, signal: Signal, values: np.ndarray, places: Places) -> Iterator[tuple[str, Reading]]:
        if (past := self._pasts.get(signal.base)) is None or len(past.mean) != len(values):
            past = self._pasts[signal.base] = Past(len(values))
        z, drift = past.compare(signal.scale(values))
        for kind, numbers in (("z", z), ("drift", drift)):
            if kind in signal.kinds:
                yield from _largest(f"{signal.base}.{kind}", numbers, places)
        if "all" in signal.kinds and np.isfinite(drift).any():
            yield f"{signal.base}.all", Reading(float(np.nanmean(drift)))

    def _over_lowest(self, signal: Signal, values: np.ndarray, places: Places) -> Iterator[tuple[str, Reading]]:
        if (lowest := self._lowest.get(signal.base)) is None or len(lowest.fast) != len(values):
            lowest = self._lowest[signal.base] = Lowest(len(values))
        for kind, numbers in zip(OVER_LOWEST, lowest.compare(signal.scale(values)), strict=True):
            if kind in signal.kinds:
                yield from _largest(f"{signal.base}.{kind}", numbers, places)

    def state_dict(self) -> dict[str, Any]:
        """Return the pasts with which the next rows are compared, in JSON's types."""
        last = {name: [row, own.value, own.place and astuple(own.place)] for name, (row, own) in self._last.items()}
        return {
            "row": self._row,
            "last": last,
            "pasts": {name: past.state_dict() for name, past in self._pasts.items()},
            "lowest": {name: lowest.state_dict() for name, lowest in self._lowest.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._row = state["row"]
        self._last = {
            name: (row, Reading(value, place and Row(*place))) for name, (row, value, place) in state["last"].items()
        }
        self._pasts = {name: Past.from_state(own) for name, own in state["pasts"].items()}
        self._lowest = {name: Lowest.from_state(own) for name, own in state.get("lowest", {}).items()}


def _level(signal: Signal, values: np.ndarray, places: Places) -> Iterator[tuple[str, Reading]]:
    sign = -1 if signal.smallest else 1
    for name, told in _largest(f"{signal.base}.level", sign * values, places):
        yield name, Reading(sign * told.value, told.place)


def _largest(name: str, values: np.ndarray, places: Places) -> Iterator[tuple[str, Reading]]:
    if np.isfinite(values).any():
        at = int(np.nanargmax(values))
        yield name, Reading(float(values[at]), places[at])
