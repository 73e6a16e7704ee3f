"""The layers of a model in a line: one cell for each layer or bin of layers, as high and as bright as its number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from ..schema import Cells, Table
from .words import BARS, number

# Viridis, as on the page and on paper: five of its colours, with linear interpolation.
VIRIDIS = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], float)
LOST, NONE, ABSENT = "bold white on red", "dim", "·"


@dataclass(frozen=True)
class Strip:
    """One stack: the largest number of each layer as ``values``, from the first layer to the last. NaN: no number was
    measured. inf: a number was not finite."""

    stack: str
    layers: tuple[int, ...]
    values: np.ndarray

    @property
    def least(self) -> int:
        """The place of the smallest number."""
        return int(np.nanargmin(np.where(np.isinf(self.values), np.nan, self.values)))

    @property
    def largest(self) -> int:
        return int(np.nanargmax(np.where(np.isinf(self.values), np.nan, self.values)))

    @property
    def lost(self) -> list[int]:
        """The layers in which a number was not finite."""
        return [layer for layer, value in zip(self.layers, self.values, strict=True) if np.isinf(value)]

    def named(self) -> str:
        """Name the first layer that is not finite, or else the weakest and the strongest layer."""
        if self.lost:
            more = f" and {len(self.lost) - 1} more" if len(self.lost) > 1 else ""
            return f"layer {self.lost[0]}{more}: not finite"
        if not np.isfinite(self.values).any():
            return "nothing measured"
        ends = [f"layer {self.layers[at]} {number(float(self.values[at]))}" for at in (self.least, self.largest)]
        return f"{ends[0]} to {ends[1]}"

    def text(self, width: int, low: float, high: float, log: bool) -> Text:
        """Draw at most ``width`` cells on the scale from ``low`` to ``high``. A bin shows its number nearest to 0, or
        that a number was not finite."""
        shown = Text()
        for cell in np.array_split(self.values, min(width, len(self.values))):
            finite = cell[np.isfinite(cell)]
            if np.isinf(cell).any():
                shown.append("x", LOST)
            elif not len(finite):
                shown.append(ABSENT, NONE)
            else:
                share = _share(float(finite[np.abs(finite).argmin()]), low, high, log)
                shown.append(BARS[int(share * (len(BARS) - 1) + 0.5)], _colour(share))
        return shown


def strips(table: Table, cells: Cells) -> list[Strip]:
    """Make a strip of each stack with layers, from the main column of a table: the largest row of each layer."""
    values, absent = cells.values[:, table.columns.index(table.main)], cells.absent
    found = []
    for stack in dict.fromkeys(row.stack for row in table.rows if row.layer > 0):
        layers = sorted({row.layer for row in table.rows if row.stack == stack and row.layer > 0})
        rows = [[i for i, row in enumerate(table.rows) if (row.stack, row.layer) == (stack, layer)] for layer in layers]
        found.append(Strip(stack, tuple(layers), np.array([_of(values[r], absent[r]) for r in rows])))
    return found


def told(table: Table, cells: Cells) -> str:
    """Write the first row of a table without layers: ``headroom 12.3, low 11.9, ...``. Numbers that are not finite are
    left out."""
    values = cells.values[0].tolist() if len(cells.values) else []
    return ", ".join(f"{c} {number(v)}" for c, v in zip(table.columns, values, strict=False) if np.isfinite(v))


def _of(values: np.ndarray, absent: np.ndarray) -> float:
    measured = values[~absent]
    if not len(measured):
        return float("nan")
    return float(measured.max()) if np.isfinite(measured).all() else float("inf")


def lines(table: Table, cells: Cells, width: int) -> Iterator[tuple[str, Text, str]]:
    """Yield (stack, strip, worst layer in words) of each stack, with one scale for all stacks."""
    found = strips(table, cells)
    known = np.concatenate([np.empty(0), *(one.values[np.isfinite(one.values)] for one in found)])
    usual = known[known > 0]
    log = bool(len(usual) == len(known) > 0 and usual.max() > 30 * usual.min()) if table.log is None else table.log
    shown = usual if log else known
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    for one in found:
        yield one.stack or "layers", one.text(width, low, high, log), one.named()


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log and value <= 0:
        return 0.0
    at, start, end = (np.log(x) for x in (value, low, high)) if log else (value, low, high)
    return float(np.clip((at - start) / (end - start), 0, 1)) if end > start else 0.5


def _colour(share: float) -> str:
    at = share * (len(VIRIDIS) - 1)
    i = min(int(at), len(VIRIDIS) - 2)
    red, green, blue = (VIRIDIS[i] + (VIRIDIS[i + 1] - VIRIDIS[i]) * (at - i)).round().astype(int)
    return f"rgb({red},{green},{blue})"
