"""The signals of the alarm: scale-free numbers of a row, each with the place at which it is largest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np

from ..decisive import decisive
from ..schema import Cells, Row, Table
from .past import Past

Transform = Callable[[np.ndarray], np.ndarray]


def log(values: np.ndarray) -> np.ndarray:
    """Return ln; NaN if a number is not positive."""
    return np.log(values, out=np.full(values.shape, np.nan), where=values > 0)


class Reading(NamedTuple):
    """A signal's value in a row, and its place."""

    value: float
    place: Row | None = None


@dataclass(frozen=True)
class Source:
    """A column of a table, or a metric (``table`` = ""), whose places are compared with their own past.

    ``transform`` makes differences scale-free: a logarithm, or asinh for numbers of either sign. ``embedding``: only
    the places outside the layers, or (False) only those inside; None: all places. ``title``: the quantity in words.
    """

    name: str
    table: str
    column: str
    title: str
    transform: Transform = log
    embedding: bool | None = None

    def chosen(self, table: Table) -> np.ndarray:
        inside = np.array([row.layer > 0 for row in table.rows])
        return np.ones_like(inside) if self.embedding is None else inside != self.embedding


SOURCES = (
    Source("loss", "", "loss", "the training loss"),
    Source("gradient", "", "grad_norm_total", "the total gradient norm"),
    Source("grad_norm", "grad_norm", "value", "the gradient norm of a sub-layer", embedding=False),
    Source("embedding_gradient", "grad_norm", "value", "the embedding's gradient norm", embedding=True),
    Source("activation_gradient", "activation_grad_norm", "value", "the gradient norm of a layer's output"),
    Source("ln_input", "ln_input", "value", "the norm of what enters a norm"),
    Source("residual", "residual_norm", "value", "the norm of the residual stream"),
    Source("heads", "attention_heads", "max_logit", "a head's largest attention logit", transform=np.arcsinh),
    Source("update", "update_ratio", "value", "a sub-layer's relative update"),
    Source("update_rms", "adam", "update_rms", "the update that Adam makes of its moments"),
    Source("rms_t", "adam", "rms_t", "the RMS of g / sqrt(v)"),
    Source("log_z", "logits", "log_z", "log Z of the output", transform=np.arcsinh),
    Source("kurtosis", "outliers", "pearson_kurtosis", "the kurtosis of a layer's output"),
)
# Numbers that need no past: table, column, sign, title. The largest over places counts; sign -1: the smallest. Numbers
# that are not decisive (an eigenvalue that has not converged, a critical rate that is a bound or noise) are not read.
LEVELS = {
    "rms_t.level": ("adam", "rms_t", 1, "the RMS of g / sqrt(v)"),
    "heads.level": ("attention_heads", "max_logit", 1, "a head's largest attention logit"),
    "log_z.level": ("logits", "abs_log_z_p99", 1, "|log Z| of one token in a hundred"),
    "update.level": ("update_ratio", "value", 1, "a sub-layer's relative update"),
    "eps_floor.level": ("adam", "eps_floor", 1, "the share of a sub-layer's entries below ten eps"),
    "headroom.level": ("critical_sharpness", "headroom", -1, "critical rate over rate"),
    "to_edge.level": ("preconditioned_sharpness", "to_edge", 1, "preconditioned sharpness over its edge"),
}
UNEVEN = "uniformity"  # of gradients over the layers of a stack
KEPT = 25  # rows for which a reading counts if no newer one comes: some tables have fewer rows
READS = frozenset({*(source.table for source in SOURCES), *(level[0] for level in LEVELS.values())} - {""})


def table_of(signal: str) -> str:
    """Return the table of a signal; "" for a metric."""
    if signal in LEVELS:
        return LEVELS[signal][0]
    base = signal.rsplit(".", 1)[0]
    return "grad_norm" if base == UNEVEN else next(source.table for source in SOURCES if source.name == base)


def metric_of(signal: str) -> str:
    """Return the metric of a signal; "" for the signal of a table."""
    if table_of(signal):
        return ""
    base = signal.rsplit(".", 1)[0]
    return next(source.column for source in SOURCES if source.name == base)


def names() -> tuple[str, ...]:
    """Return all signals, in their order.

    Each source has its largest z and its largest drift, and with several places also its mean drift. Then come the
    levels, and the unevenness of gradients.
    """
    found: list[str] = []
    for source in SOURCES:
        found += [f"{source.name}.z", f"{source.name}.drift"]
        if source.table and source.table != "logits":
            found.append(f"{source.name}.all")
    return (*found, *LEVELS, f"{UNEVEN}.level", f"{UNEVEN}.drift")


class Signals:
    """Turns rows into signals, one after the other, and keeps the past of each place.

    ``read`` returns for each source the largest ``z`` and ``drift`` over places (``.all``: the mean drift over places),
    for each level its largest decisive number (:mod:`stabilitylab.decisive`), and the standard deviation of the log
    gradient norms of a stack's layers (``uniformity.level``, DeepNet's balance; its drift is against its own past). A
    number that a row does not hold keeps its last value for 25 rows, and is left out after that. A past is counted in
    rows, so rows should have one distance.
    """

    def __init__(self) -> None:
        self._pasts: dict[str, Past] = {}
        self._tables: dict[str, Table] = {}
        self._last: dict[str, tuple[int, Reading]] = {}  # signal -> number of its row, reading
        self._row = 0

    def open(self, tables: Sequence[Table]) -> None:
        self._tables = {table.name: table for table in tables}

    def read(
        self, metrics: Mapping[str, float | None], tables: Mapping[str, Cells], *, more: bool = False
    ) -> dict[str, Reading]:
        """Return the signals of this row, and add the row to the pasts; ``more``: these are the rest of the last
        row."""
        self._row += not more
        told: dict[str, Reading] = {}
        for source in SOURCES:
            told.update(self._past(source, metrics, tables))
        for name, (table, column, sign, _) in LEVELS.items():
            if (cells := tables.get(table)) is not None:
                told.update(self._level(name, self._settled(table, column, cells), table, sign))
        if (cells := tables.get("grad_norm")) is not None:
            told.update(self._unevenness(self._column("grad_norm", "value", cells)))
        self._last.update({name: (self._row, reading) for name, reading in told.items()})
        return {name: reading for name, (row, reading) in self._last.items() if self._row - row < KEPT}

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

    def _past(
        self, source: Source, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]
    ) -> Iterator[tuple[str, Reading]]:
        if source.table:
            if (cells := tables.get(source.table)) is None:
                return
            rows: Sequence[Row | None] = self._tables[source.table].rows
            values = self._column(source.table, source.column, cells)
            keep = source.chosen(self._tables[source.table])
            rows, values = [row for row, own in zip(rows, keep, strict=True) if own], values[keep]
        else:
            if (number := metrics.get(source.column)) is None:
                return
            rows, values = [None], np.array([number], dtype=float)
        if (past := self._pasts.get(source.name)) is None or len(past.mean) != len(values):
            past = self._pasts[source.name] = Past(len(values))
        z, drift = past.compare(source.transform(values))
        yield from _largest(f"{source.name}.z", z, rows)
        yield from _largest(f"{source.name}.drift", drift, rows)
        if source.table and source.table != "logits" and np.isfinite(drift).any():
            yield f"{source.name}.all", Reading(float(np.nanmean(drift)))

    def _level(self, name: str, values: np.ndarray, table: str, sign: int) -> Iterator[tuple[str, Reading]]:
        for key, told in _largest(name, sign * values, self._tables[table].rows):
            yield key, Reading(sign * told.value, told.place)

    def _unevenness(self, gradients: np.ndarray) -> Iterator[tuple[str, Reading]]:
        rows = self._tables["grad_norm"].rows
        logs, stacks = log(gradients), [row.stack if row.layer else "" for row in rows]
        found = [(_spread(logs[[own == stack for own in stacks]]), stack) for stack in dict.fromkeys(stacks) if stack]
        known = [(value, stack) for value, stack in found if math.isfinite(value)]
        if known:
            value, stack = max(known)
            yield f"{UNEVEN}.level", Reading(value, Row("", stack))
            past = self._pasts.setdefault(UNEVEN, Past(1))
            _, drift = past.compare(log(np.array([value])))
            yield from _largest(f"{UNEVEN}.drift", drift, [Row("", stack)])

    def state_dict(self) -> dict[str, Any]:
        """Return the pasts with which the next rows are compared, in JSON's types."""
        last = {name: [row, own.value, own.place and astuple(own.place)] for name, (row, own) in self._last.items()}
        return {
            "row": self._row,
            "last": last,
            "pasts": {name: past.state_dict() for name, past in self._pasts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._row = state["row"]
        self._last = {
            name: (row, Reading(value, place and Row(*place))) for name, (row, value, place) in state["last"].items()
        }
        self._pasts = {name: Past.from_state(own) for name, own in state["pasts"].items()}


def _spread(values: np.ndarray) -> float:
    """Return the standard deviation of the finite values; NaN for fewer than two."""
    values = values[np.isfinite(values)]
    return float(values.std()) if len(values) > 1 else math.nan


def _largest(name: str, values: np.ndarray, rows: Sequence[Row | None]) -> Iterator[tuple[str, Reading]]:
    if np.isfinite(values).any():
        place = int(np.nanargmax(values))
        yield name, Reading(float(values[place]), rows[place])
