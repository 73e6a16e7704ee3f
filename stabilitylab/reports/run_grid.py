"""The numbers of one run as a page shows them: a probe's table as places by steps, a metric against its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from ..schema import Row
from ..store.reader import By
from .collection import Record


@dataclass(frozen=True)
class LayerGrid:
    """A column of a probe's table: ``values``, ``absent`` and ``missing`` (places, steps), and name, stack and layer of
    each place. Places outside of layers are left out, unless the table has no others. ``missing``: no such cell."""

    steps: np.ndarray
    values: np.ndarray
    absent: np.ndarray
    missing: np.ndarray
    stacks: np.ndarray
    layers: np.ndarray
    names: list[str]
    parts: list[str]  # sub-layers, or what else a row is called beside its layer
    sites: list[str]
    by_layer: bool
    column: str
    unit: str
    log: bool | None

    @property
    def outputs(self) -> bool:
        """Return True if each row is that of a whole stack, so that lines are drawn rather than maps of one row."""
        return not self.layers.any() and len({*self.stacks.tolist()}) == len(self.stacks) and len(self.steps) > 1

    @property
    def label(self) -> str:
        """The name of the column's axis, such as ``entropy [nats]``."""
        column = self.column.replace("_", " ")
        return f"{column} [{self.unit}]" if self.column != "value" and self.unit else self.unit or column

    @property
    def lost(self) -> np.ndarray:
        return ~self.absent & ~self.missing & ~np.isfinite(self.values)


def read(record: Record, table: str, *, by_layer: bool = True, column: str = "") -> LayerGrid | None:
    """Read a column of a table, by default its main one; None if nothing is recorded yet. ``by_layer``: combine the
    rows of a layer, if the table says how."""
    definition = record.run.table(table)
    column = column or definition.main
    layered = any(row.layer > 0 for row in definition.rows)
    combined = by_layer and layered and bool(definition.total)
    by: By | None = "layer" if combined else None
    cells = record.run.cells(table, column, by=by)
    if not len(cells.steps):
        return None
    rows = [place for place, row in enumerate(cells.rows) if row.layer > 0 or not layered]
    own = [cells.rows[place] for place in rows]
    stacks, layers = np.array([row.stack for row in own], str), np.array([row.layer for row in own], np.int32)
    values, absent, missing = (part.T[rows] for part in (cells.values, cells.absent, cells.missing & ~cells.absent))
    names, parts, sites = [_name(row) for row in own], [row.sublayer for row in own], [row.site for row in own]
    main = column == definition.main  # unit and scale are those of the main column
    facts = (combined, column, definition.unit if main else "", definition.log if main else None)
    return LayerGrid(cells.steps, values, absent, missing, stacks, layers, names, parts, sites, *facts)


def _name(row: Row) -> str:
    if row.layer < 1:
        return row.site or row.stack
    stack = f" of {row.stack}" if row.stack else ""
    part = f" ({row.sublayer})" if row.sublayer else ""
    return f"layer {row.layer}{stack}{part}"


def metric(record: Record, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the steps at which a metric was measured, and its values; a NaN among them is a measured NaN."""
    whole = record.columns()
    if column not in whole.column_names:
        return np.empty(0, int), np.empty(0)
    data = whole.select(["step", column])
    data = data.filter(pc.is_valid(data[column]))  # pyright: ignore[reportAttributeAccessIssue]
    return data["step"].to_numpy(), data[column].to_numpy().astype(float)


def first_metric(record: Record, *columns: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of the first of these metrics that was measured."""
    measured = (metric(record, column) for column in columns)
    return next(((steps, values) for steps, values in measured if len(steps)), (np.empty(0, int), np.empty(0)))


def lost_at(record: Record, *columns: str) -> int | None:
    """Finds the first step at which one of these metrics is not finite."""
    lost = [x[~np.isfinite(y)] for x, y in (metric(record, column) for column in columns)]
    return min((int(steps[0]) for steps in lost if len(steps)), default=None)
