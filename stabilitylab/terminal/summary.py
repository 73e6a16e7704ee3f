"""The table by depth, which is printed at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..histograms import TABLES as HISTOGRAMS
from .words import number

if TYPE_CHECKING:
    from ..store import Run


def summary(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the table by depth: first, middle, last layer of a stack; first and last recorded row.

    Rows of a layer are combined by the table's own rule (root sum of squares of norms), or averaged if it has none.
    A number that is measured at the output of a stack stands under its last layer. Histograms are left out: no single
    column says what they hold.
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
        table = run.table(name)
        column = table.main
        frame = run.frame(name, columns=[column], by="layer" if table.total else None)
        if not frame["layer"].to_numpy().any():
            frame["layer"] = [tops.get(str(stack), 0) for stack in frame["stack_name"]]
        inside = frame[(frame["layer"] > 0) & frame[column].notna()]
        grid = inside.pivot_table(column, "step", ["stack_name", "layer"], aggfunc="mean", observed=True)
        for step in dict.fromkeys([*grid.index[:1], *grid.index[-1:]]):  # one line if there is one step
            at = grid.loc[step]
            body.append([name, str(step), *(number(at.get(place)) for place in places)])
    return ["probe", "step", *(f"{stack[:3]} {layer}" for stack, layer in places)], body
