#!/usr/bin/env python
"""Draws figures anew from their committed tables, without their runs: after a change of the look alone.

python results/tiny/redraw.py      # deepnet-5, branchnorm-3 and table-stability, each with its controls

The numbers of a table stay as they are, and a number that the new picture does not draw as it stands ends the script.
Panels may be cut otherwise, and names of lines may change; the exponents of deepnet:5 are fitted anew to the drawn
means, which equals the mean over seeds where all seeds have all depths.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from stabilitylab.models import ARCHS
from stabilitylab.reports import Panel, Picture, Series, paper, style
from stabilitylab.reports.arrange import alike
from stabilitylab.reports.figures.branchnorm import figure_3
from stabilitylab.reports.figures.deepnet import figure_5
from stabilitylab.reports.figures.table import stability
from stabilitylab.reports.measures.gains import shown_dash
from stabilitylab.reports.statistics import slope

WHOLE = figure_5.whole_panel((), ()).title
GROUPS = {printed: key for key, printed in figure_5.NAMES.items()}
FIGURES = Path(__file__).parent / "figures"
KEPT = ("png", "pdf", "csv")
ENDS = {", raw": {"faint": True, "marker": ""}, f", mean of {figure_3.WINDOW} updates": {"marker": "none"}}


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(FIGURES / f"{name}.csv", keep_default_na=False, na_values=[""])


def label_of(title: str) -> str:
    """``branchnorm T=1`` of ``BranchNorm T=1``: the label that stands behind a printed name."""
    names = {style.title(name): name for name in ARCHS}
    for printed in sorted(names, key=len, reverse=True):
        if title.startswith(printed):
            rest = title.removeprefix(printed)
            return names[printed] + (f"/{label_of(rest[1:])}" if rest.startswith("/") else rest)
    raise ValueError(f"no architecture has the name {title!r}")


def lines(data: pd.DataFrame) -> Iterator[tuple[str, str, Series]]:
    """Panel, name and line of each series, in their order."""
    for (panel, name), own in data.groupby(["panel", "series"], sort=False):
        ends = {key: own[key].tolist() if own[key].notna().any() else None for key in ("low", "high")}
        yield panel, name, Series(name, own["x"].tolist(), own["y"].tolist(), **ends, seeds=own["seeds"].tolist())


def exponent(line: Series, depths: range) -> float:
    inside = [(x, y) for x, y in zip(line.x, line.y, strict=True) if x in depths]
    return round(slope(*(np.log(one).tolist() for one in zip(*inside, strict=True))), 2) if len(inside) > 1 else np.nan


def update_against_depth(name: str) -> Picture:
    """DeepNet's Figure 5."""
    found = list(lines(table(name)))
    depths = sorted({int(x) for *_, line in found for x in line.x})
    whole, groups = [], {optimizer: [] for optimizer in figure_5.OPTIMIZERS}
    labels = [label_of(line.partition(": N^")[0]) for panel, line, _ in found if panel == WHOLE]
    of_optimizer = {printed: key for key, printed in figure_5.OPTIMIZERS.items()}
    for panel, own, line in found:
        rest = own.rpartition(", ")[2]
        if panel == WHOLE and rest != "slope":
            title = own.partition(": N^")[0]
            label = label_of(title)
            drawn = replace(line, label=title, arch=label, dash=shown_dash(labels, label))
            depths_of = figure_5.fitted(label)
            whole += figure_5.with_law(drawn, exponent(line, depths_of), depths_of)
        elif panel != WHOLE:
            optimizer, group = of_optimizer[panel.rpartition(", ")[2]], GROUPS[own.partition(": N^")[0]]
            groups[optimizer].append(figure_5.group_line(group, exponent(line, figure_5.COMPARED), line))
    panels = [figure_5.whole_panel(whole, depths)]
    panels += [figure_5.group_panel("deepnorm", key, own, depths) for key, own in groups.items() if own]
    return Picture(
        panels, "", columns=3, key=figure_5.KEY, provenance=f"{len(depths)} depths, 64 wide, text data, one step"
    )


def beginning(name: str) -> Picture:
    """BranchNorm's Figure 3."""
    panels: dict[str, list[Series]] = {}
    axes: dict[str, tuple[str, str, bool]] = {}
    data = table(name)
    for panel, own, line in lines(data):
        title, _, detail = own.partition(", ")
        arch, look = label_of(title), dict(ENDS.get(f", {detail}", {}))
        if detail:
            look |= {"detail": detail, "dash": figure_3.PARTS[detail][1] if detail in figure_3.PARTS else ""}
        stack = panel.partition(" layers")[0].lower()
        axes[panel] = (
            f"{stack} layer" if " layers" in panel else "update",
            _axis(data, panel),
            panel != "Training loss",
        )
        made = Series(title, line.x, line.y, line.low, line.high, arch, seeds=line.seeds, **look)
        panels.setdefault(panel, []).append(made)
    drawn = [Panel(title, x, y, panels[title], log_y=log) for title, (x, y, log) in axes.items()]
    by_title = {panel.title: panel for panel in drawn}
    ordered = [by_title.pop(title) for title in ("Gradient norm", "Training loss", "Without the factor alpha")]
    for stack in ("Encoder", "Decoder"):
        own = [panel for title, panel in by_title.items() if title.startswith(stack)]
        ordered += alike(sorted(own, key=lambda panel: int(panel.title.rpartition(" ")[2])))
    told = "18L-18L, 64 wide, text data, 240 updates, T 100 % of them"
    return Picture(ordered, "", columns=3, provenance=told, key=figure_3.KEY)


def _axis(data: pd.DataFrame, panel: str) -> str:
    return data.loc[data["panel"] == panel, "axis"].iloc[0]


def stability_table(name: str) -> Picture:
    """The stability table."""
    cells = stability.table_map(table(f"{name}-table"), False, ("tfixup",))
    key = "(in parentheses): a seed not 0.25 nats below the baseline · * T-Fixup: train.warmup = 0"
    told = "2 depths, 64 wide, text data, 160 updates, T 3.75 % of them"
    return Picture([stability.table_panel(cells, False)], "", columns=1, key=key, provenance=told)


DRAWN: dict[str, Callable[[str], Picture]] = {
    "deepnet-5": update_against_depth,
    "deepnet-5-controls": update_against_depth,
    "branchnorm-3": beginning,
    "branchnorm-3-controls": beginning,
    "table-stability": stability_table,
}


def points(data: pd.DataFrame) -> list[tuple[str | float, ...]]:
    """Every drawn point with its axis, but those of a fitted slope, in an order of their own."""
    data = data[~data["series"].str.endswith(", slope")]
    values = data[["x", "y", "low", "high", "seeds"]].fillna(-1.0).to_numpy(float).tolist()
    return sorted((axis, *row) for axis, row in zip(data["axis"], values, strict=True))


def main() -> None:
    for name, draw in DRAWN.items():
        picture = draw(name)
        if points(picture.frame()) != points(table(name)):
            raise SystemExit(f"{name}: the picture does not draw the numbers of its table.")
        with tempfile.TemporaryDirectory() as folder:
            files = paper.write(picture, Path(folder), name)
            for kind in KEPT:
                (FIGURES / f"{name}.{kind}").write_bytes(files[kind].read_bytes())


if __name__ == "__main__":
    main()
