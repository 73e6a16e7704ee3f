"""Combines the rows of one layer (or sub-layer) into one number, by the table's ``total`` rule."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from ..errors import UsageError
from ..schema import Row, Table

By = Literal["layer", "sublayer"]


class Combined(NamedTuple):
    """Groups of rows, and arrays of shape (steps, groups): their values by column, ``missing`` cells of a column (True
    where the cell does not exist), and ``absent`` (True where the whole group is absent)."""

    rows: tuple[Row, ...]
    values: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]
    absent: np.ndarray


def combine(
    table: Table,
    columns: Mapping[str, np.ndarray],
    absent: np.ndarray,
    by: By,
    missing: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Combined:
    """Combine values, their absence and that of single cells (``missing``, by column), all of shape (steps, rows), by
    group.

    Absent rows and missing cells add nothing. A group is absent if all its rows are; a cell of a group is missing if
    all cells of its rows are. Rows outside the layers are layer 0. Raises UsageError for another ``by``, and for a
    table whose rows do not combine.
    """
    if by not in ("layer", "sublayer"):
        raise UsageError(f"rows combine by 'layer' or 'sublayer', not by {by!r}.")
    if table.total not in _RULES:
        raise UsageError(f"rows of {table.name!r} do not combine ({table.unit or 'no unit'}): leave out by={by!r}.")
    groups = [Row("", row.stack, row.layer, row.sublayer if by == "sublayer" else "") for row in table.rows]
    unique = tuple(dict.fromkeys(groups))
    index = {group: code for code, group in enumerate(unique)}
    codes = np.array([index[group] for group in groups])
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(len(unique)))
    absent = absent[:, order]
    gone = np.logical_and.reduceat(absent, starts, axis=1)  # (steps, groups)
    combined, none = {}, {}
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for name, values in columns.items():
            left_out = absent | missing[name][:, order] if name in missing else absent
            result = _RULES[table.total](np.where(left_out, 0.0, values[:, order]), ~left_out, starts, codes[order])
            none[name] = np.logical_and.reduceat(left_out, starts, axis=1)
            combined[name] = np.where(none[name], np.nan, result)
    return Combined(unique, combined, none, gone)


def _norm(values: np.ndarray, present: np.ndarray, starts: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the root of the sum of squares, scaled by the largest value so that squares of 1e-200 do not underflow to
    0."""
    largest = np.maximum.reduceat(np.abs(values), starts, axis=1)
    scale = np.where(np.isfinite(largest) & (largest > 0), largest, 1.0)
    return scale * np.sqrt(np.add.reduceat((values / scale[:, codes]) ** 2, starts, axis=1))


def _mean(values: np.ndarray, present: np.ndarray, starts: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, starts, axis=1) / np.maximum(np.add.reduceat(present, starts, axis=1, dtype=int), 1)


_RULES = {"norm": _norm, "mean": _mean}
