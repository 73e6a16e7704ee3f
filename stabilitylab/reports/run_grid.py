"""The numbers of one run as a page shows them: a probe's table as places by steps, a metric against its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ..store.arrays import steps_in
from ..store.layout import METRICS
from ..store.reader import By
from .collection import Record


@dataclass(frozen=True)
class LayerGrid:
    """Holds a column of a probe's table: ``values``, ``absent`` and ``missing`` (places, steps), what the places are
    called, and the stack and layer of each; outside of all layers only where the model has none. ``missing``: there is
    no such cell."""

    steps: np.ndarray
    values: np.ndarray
    absent: np.ndarray
    missing: np.ndarray
    stacks: np.ndarray
    layers: np.ndarray
    names: list[str]
    parts: list[str]  # sub-layers, or what else a row is called beside its layer
    by_layer: bool
    column: str
    unit: str
    log: bool | None

    @property
    def outputs(self) -> bool:
        """Says whether these are a few numbers of whole stacks, one each: lines rather than maps of a single row."""
        return not self.layers.any() and len({*self.stacks.tolist()}) == len(self.stacks) and len(self.steps) > 1

    @property
    def label(self) -> str:
        """Names its axis, such as ``entropy [nats]``."""
        column = self.column.replace("_", " ")
        return f"{column} [{self.unit}]" if self.column != "value" and self.unit else self.unit or column

    @property
    def lost(self) -> np.ndarray:
        return ~self.absent & ~self.missing & ~np.isfinite(self.values)


def read(record: Record, table: str, *, by_layer: bool = True) -> LayerGrid | None:
    """Reads the main column of a table; ``by_layer`` combines the rows of a layer, where they combine; None: nothing
    recorded yet."""
    definition = record.run.table(table)
    column = definition.main
    layered = any(row.layer > 0 for row in definition.rows)
    combined = by_layer and layered and bool(definition.total)
    by: By | None = "layer" if combined else None
    data = record.frame(table, [column], by=by)
    if data.empty:
        return None
    steps = steps_in(data["step"].to_numpy())
    first = data.iloc[: len(data) // len(steps)]
    values, absent = (data[name].to_numpy().reshape(len(steps), -1).T for name in (column, "absent"))
    missing = np.zeros(values.shape, bool)
    if (np.isnan(values) & ~absent).any():  # a frame does not tell a NaN that was measured from no cell
        empty = record.run.arrow(table, columns=[column], by=by)[column].is_null()
        missing = empty.to_numpy().reshape(len(steps), -1).T & ~absent
    rows = np.flatnonzero(first["layer"].to_numpy() > 0) if layered else np.arange(len(first))
    stacks, layers = first["stack_name"].to_numpy().astype(str)[rows], first["layer"].to_numpy()[rows]
    names = [_name(first.iloc[row]) for row in rows]
    parts = [str(first.iloc[row].get("sublayer") or "") for row in rows]
    facts = (combined, column, definition.unit, definition.log)
    return LayerGrid(steps, values[rows], absent[rows], missing[rows], stacks, layers, names, parts, *facts)


def _name(row: Any) -> str:
    if row["layer"] < 1:
        return str(row.get("site") or row["stack_name"])
    stack = f" of {row['stack_name']}" if row["stack_name"] else ""
    part = f" ({row['sublayer']})" if row.get("sublayer") else ""
    return f"layer {row['layer']}{stack}{part}"


def metric(record: Record, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads steps and values where it was measured; a NaN among them was."""
    whole = record.remember(METRICS, lambda: record.run.arrow(METRICS))
    if column not in whole.column_names:
        return np.empty(0, int), np.empty(0)
    data = whole.select(["step", column])
    data = data.filter(pc.is_valid(data[column]))  # pyright: ignore[reportAttributeAccessIssue]
    return data["step"].to_numpy(), data[column].to_numpy().astype(float)


def lost_at(record: Record, *columns: str) -> int | None:
    """Finds the first step at which one of these metrics is not finite."""
    lost = [x[~np.isfinite(y)] for x, y in (metric(record, column) for column in columns)]
    return min((int(steps[0]) for steps in lost if len(steps)), default=None)
