"""The table by depth, which is printed at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..histograms import TABLES as HISTOGRAMS
from .words import number

if TYPE_CHECKING:
    from ..store import Run

Place = tuple[str, int]  # stack and layer


def summary(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the table by depth: first, middle, last layer of a stack; first and last recorded row.

    Rows of a layer are combined by the table's own rule (root sum of squares of norms), or averaged if it has none.
    A number that is measured at the output of a stack stands under its last layer. Rows in which no layer was measured
    are left out; a measured NaN is a number like any other. Histograms are left out: no single column says what they
    hold.
    """
    model = run.config["model"]
    places = [
        (stack, layer)
        for stack in ("encoder", "decoder")
        if (layers := model[f"{stack}_layers"])
        for layer in sorted({1, (layers + 1) // 2, layers})
    ]
    tops = dict(places)  # the last place of a stack wins
    body: list[list[str]] = []
    for name in (name for name in run.tables if name not in HISTOGRAMS):
        for step, at in _ends(run, name, tops):
            body.append([name, str(step), *(number(at.get(place)) for place in places)])
    return ["probe", "step", *(f"{stack[:3]} {layer}" for stack, layer in places)], body


def _ends(run: Run, name: str, tops: dict[str, int]) -> list[tuple[int, dict[Place, float]]]:
    """Return the first and the last step at which a layer was measured, each with the number of each place that was
    measured then."""
    cells = run.cells(name, by="layer" if run.table(name).total else None)
    layered = any(row.layer for row in cells.rows)
    of = [(row.stack, row.layer if layered else tops.get(row.stack, 0)) for row in cells.rows]
    measured = ~cells.missing & np.array([layer > 0 for _, layer in of])
    steps = np.flatnonzero(measured.any(axis=1)).tolist()
    found = []
    for row in dict.fromkeys([*steps[:1], *steps[-1:]]):  # one line if there is one step
        values: dict[Place, list[float]] = {}
        for column in np.flatnonzero(measured[row]).tolist():
            values.setdefault(of[column], []).append(float(cells.values[row, column]))
        with np.errstate(invalid="ignore", over="ignore"):  # the mean of inf and -inf is NaN
            found.append((int(cells.steps[row]), {place: float(np.mean(own)) for place, own in values.items()}))
    return found
