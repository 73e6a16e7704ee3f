"""A run as a LaTeX table: each probe at the first, middle and last layer of each stack, first and last step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..printable import printable
from ..store import Run
from ..store.layout import METRICS

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escape(text: str) -> str:
    """Return ``text`` as TeX prints it, on one line; control characters are shown as their escapes."""
    return "".join(SPECIAL.get(sign, sign) for sign in printable(" ".join(text.split())))


def number(value: float | None) -> str:
    """Return three significant digits; ``--`` if there is no number."""
    if value is None:
        return "--"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else r"$\infty$" if value > 0 else r"$-\infty$"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"${value:.3g}$"
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa}\times10^{{{int(exponent)}}}$"


def layers(run: Run, tables: Mapping[str, pa.Table], out: Path) -> list[Path]:
    """Write ``layers.tex``: a ``tabular`` for ``\\input``; needs the package booktabs. Rows of a layer are combined by
    the table's rule, or averaged if it has none; tables without layers are left out."""
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
Layered = tuple[str, dict[Place, dict[int, float | None]], list[int]]  # column, place -> step -> value, steps


def _grid(run: Run, name: str) -> Layered | None:
    """Return the main column of a table by layer: NaN if a NaN was measured, None if nothing was. None for a table
    without layers, or without a number in any of them."""
    table = run.table(name)
    data = run.arrow(name, columns=[table.main], by="layer" if table.total else None).to_pydict()
    measured: dict[Place, dict[int, list[float]]] = {}
    for step, stack, layer, value in zip(
        *(data[key] for key in ("step", "stack_name", "layer", table.main)), strict=True
    ):
        if layer:
            of_place = measured.setdefault((str(stack), layer), {}).setdefault(step, [])
            of_place += [] if value is None else [value]
    if not any(values for steps in measured.values() for values in steps.values()):
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # the mean of inf and -inf is NaN, and is printed as such
        means = {
            place: {step: float(np.mean(values)) if values else None for step, values in steps.items()}
            for place, steps in measured.items()
        }
    return table.main, means, sorted({*data["step"]})


def _order(grids: Mapping[str, Layered]):
    ranks = {stack: i for i, stack in enumerate(dict.fromkeys(s for grid in grids.values() for s, _ in grid[1]))}
    return lambda place: (ranks[place[0]], place[1])


def _lines(run: Run, grids: Mapping[str, Layered], shown: list[Place]) -> list[str]:
    body = []
    for name, (column, found, steps) in grids.items():
        title = escape(name if column == "value" else f"{name}.{column}")
        for step in dict.fromkeys((steps[0], steps[-1])):
            cells = [number(found.get(place, {}).get(step)) for place in shown]
            body.append(" & ".join([title if step == steps[0] else "", str(step), *cells]) + r" \\")
    head = [escape(f"{stack} {n}".strip()) for stack, n in shown]
    return [
        f"% {printable(run.name)}: first, middle and last layer at the first and last step;",
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{lr{'r' * len(shown)}}}",
        r"\toprule",
        " & ".join(["probe", "step", *head]) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
