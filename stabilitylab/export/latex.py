"""A run as a LaTeX table: each probe at the first, middle and last layer of each stack, first and last step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..store import Run
from ..store.layout import METRICS

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escape(text: str) -> str:
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def number(value: float | None) -> str:
    """Three significant digits; ``--`` where there is none."""
    if value is None:
        return "--"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else r"$\infty$" if value > 0 else r"$-\infty$"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"${value:.3g}$"
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa}\times10^{{{int(exponent)}}}$"


def layers(run: Run, tables: Mapping[str, pa.Table], out: Path) -> list[Path]:
    """``layers.tex``: a ``tabular`` for ``\\input``; needs the package booktabs. Rows of a layer are combined by the
    table's rule, or averaged where it has none; tables without layers are left out."""
    grids = {name: grid for name in tables if name != METRICS and (grid := _grid(run, name)) is not None}
    places = sorted({(stack, n) for grid in grids.values() for stack, n in grid[1]}, key=_order(grids))
    stacks = dict.fromkeys(stack for stack, _ in places)
    shown = []
    for stack in stacks:
        known = sorted({n for s, n in places if s == stack})
        shown += [(stack, n) for n in sorted({known[0], known[(len(known) - 1) // 2], known[-1]})]
    path = out / "layers.tex"
    path.write_text("\n".join(_lines(run, grids, shown)) + "\n", encoding="utf-8")
    return [path]


Place = tuple[str, int]
Layered = tuple[str, dict[Place, int], np.ndarray, np.ndarray]  # column, place -> position, steps, values (S, places)


def _grid(run: Run, name: str) -> Layered | None:
    table = run.table(name)
    column = table.main
    frame = run.frame(name, columns=[column], by="layer" if table.total else None)
    frame = frame[(frame["layer"] > 0) & ~frame["absent"]]
    if frame.empty:
        return None
    wide = frame.pivot_table(column, "step", ["stack_name", "layer"], aggfunc="mean", observed=True, dropna=False)
    found = {(str(stack), int(n)): index for index, (stack, n) in enumerate(wide.columns)}
    return column, found, wide.index.to_numpy(), wide.to_numpy()


def _order(grids: Mapping[str, Layered]):
    ranks = {stack: i for i, stack in enumerate(dict.fromkeys(s for grid in grids.values() for s, _ in grid[1]))}
    return lambda place: (ranks[place[0]], place[1])


def _lines(run: Run, grids: Mapping[str, Layered], shown: list[Place]) -> list[str]:
    body = []
    for name, (column, found, steps, values) in grids.items():
        title = escape(name if column == "value" else f"{name}.{column}")
        for at in dict.fromkeys((0, len(steps) - 1)):
            cells = [number(float(values[at, found[p]]) if p in found else None) for p in shown]
            body.append(" & ".join([title if at == 0 else "", str(steps[at]), *cells]) + r" \\")
    head = [escape(f"{stack} {n}".strip()) for stack, n in shown]
    return [
        f"% {run.name}: first, middle and last layer at the first and last step; needs \\usepackage{{booktabs}}",
        rf"\begin{{tabular}}{{lr{'r' * len(shown)}}}",
        r"\toprule",
        " & ".join(["probe", "step", *head]) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
