"""Draws a table or a metric of one run on matplotlib Axes: :meth:`stabilitylab.store.Run.plot`."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...errors import InputError, UsageError
from ...registry import spelling
from ...store import Run
from ...store.layout import METRICS
from ...store.views import VIEWS
from ..base import FINDINGS, NONFINITE, Map, Panel, Series
from ..collection import Record
from ..diagnosis import logarithmic
from ..heatmaps import ALONG, SPECIAL, bar, draw_map
from ..lines import name_ends
from ..pooling import findings
from ..run_grid import LayerGrid, metric, read
from ..style import INK

DASHES = ("solid", "dashed", "dotted", "dashdot")  # of the stacks, in their order
NAMED = 8  # lines that have a name at their ends; of more the colour says the layer
TICKS = 4  # layers of a stack that have a tick in a map of several stacks
SIZE = 8  # points of a name at a line's end
BAR = 40  # letters of a line beside a colour bar


@VIEWS.register("plot")
def plot(
    run: Run, name: str, *, kind: str = "lines", column: str = "", stack: str = "", axes: Axes | None = None
) -> Axes:
    """Draw a table or a metric of ``run``; see :meth:`stabilitylab.store.Run.plot`."""
    if kind not in ("lines", "map"):
        raise UsageError(f"kind={kind!r}: a run is drawn as kind='lines' or as kind='map'.")
    record = Record(run.snapshot(), run.name)
    tables, metrics = record.run.tables, [*record.run.arrow(METRICS).column_names[1:]]
    known = {spelling(one): one for one in (*metrics, *tables)}
    if (found := known.get(spelling(name))) is None:
        told = f"the tables {', '.join(tables) or '(none)'}, and the metrics {', '.join(metrics) or '(none)'}"
        raise InputError(f"{run.path} has no table or metric {name!r}; it has {told}.")
    if found not in tables:
        if kind == "map" or column or stack:
            raise UsageError(f"{found!r} is a metric, one number a step: leave out kind='map', column= and stack=.")
        return _metric(axes or _new(), found, *metric(record, found))
    grid = read(record, found, column=column)
    if grid is None:
        raise InputError(f"{run.path} has recorded nothing in {found!r} yet: come back after its first steps.")
    grid = _of(grid, stack, found)
    own = axes is None
    axes = axes or _new()
    axes.set_title(found.replace("_", " ") + (f", {stack}" if stack else ""))
    return _map(axes, grid) if kind == "map" else _lines(axes, grid, own)


def _new() -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained")[1]


def _of(grid: LayerGrid, stack: str, table: str) -> LayerGrid:
    """Return the rows of one stack; all rows if ``stack`` is ""."""
    if not stack:
        return grid
    if stack not in grid.stacks:
        raise UsageError(
            f"{table!r} has no stack {stack!r}; it has {', '.join(filter(None, _stacks(grid))) or 'none'}."
        )
    rows = np.flatnonzero(grid.stacks == stack)
    cut = {part: getattr(grid, part)[rows] for part in ("values", "absent", "missing", "stacks", "layers")}
    return replace(grid, **cut, names=[grid.names[row] for row in rows], parts=[grid.parts[row] for row in rows])


def _stacks(grid: LayerGrid) -> list[str]:
    return list(dict.fromkeys(grid.stacks.tolist()))


def _metric(axes: Axes, name: str, steps: np.ndarray, values: np.ndarray) -> Axes:
    lost = ~np.isfinite(values)
    axes.plot(steps, np.where(lost, np.nan, values), color=INK, marker="o" if len(steps) == 1 else "", label=name)
    _scale(axes, None, values)
    _mark(axes, [(steps, values, lost)])
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    return axes


def _lines(axes: Axes, grid: LayerGrid, own: bool) -> Axes:
    """Draw a line for each layer, or for each place if the rows of a layer do not combine."""
    few, stacks = len(grid.names) <= NAMED, _stacks(grid)
    order = grid.layers if grid.layers.any() else np.arange(1, len(grid.names) + 1)
    shade = Normalize(float(order.min()), float(max(order.max(), order.min() + 1)))
    palette = matplotlib.colormaps[ALONG]
    drawn = []
    for row, name in enumerate(grid.names):
        usual = np.where(grid.absent[row] | grid.lost[row], np.nan, grid.values[row])
        look = {"color": palette(shade(order[row])), "linestyle": DASHES[stacks.index(grid.stacks[row]) % len(DASHES)]}
        axes.plot(grid.steps, usual, **look, marker="o" if len(grid.steps) == 1 else "", label=name)
        colour = to_hex(look["color"])
        drawn.append(Series(name, grid.steps.tolist(), usual.tolist(), colour=colour, dash="solid"))
    logarithmic_axis = _scale(axes, grid.log, grid.values)
    _mark(axes, [(grid.steps, grid.values[row], grid.lost[row]) for row in range(len(grid.names))])
    axes.set(xlabel="step", ylabel=grid.label)
    if few and own and len(grid.names) > 1:
        name_ends(axes, Panel("", "", "", drawn, log_y=logarithmic_axis, direct=True), SIZE)
    elif few and len(grid.names) > 1:
        axes.legend()
    elif not few:
        _key(axes, grid, shade)
    return axes


def _key(axes: Axes, grid: LayerGrid, shade: Normalize) -> None:
    """Add the keys to colours and dashes, which replace names if there are many lines."""
    figure = _figure(axes)
    what = "layer" if grid.layers.any() else "place"
    figure.colorbar(ScalarMappable(shade, ALONG), ax=axes, label=what).locator = MaxNLocator(integer=True)
    if len(stacks := _stacks(grid)) > 1:
        looks = zip(stacks, DASHES * len(stacks), strict=False)
        axes.legend(handles=[Line2D([], [], color=INK, ls=dash, label=one) for one, dash in looks])


def _figure(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None, "these Axes were removed from their figure"
    return figure


def _scale(axes: Axes, log: bool | None, values: np.ndarray) -> bool:
    """Set the scale that the table declares, or the one of the numbers if it declares none."""
    if found := logarithmic(log, values[np.isfinite(values)]):
        axes.set_yscale("log")
    return found


def _mark(axes: Axes, rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """Mark the first number of each line that is not finite: a red cross at its step, at the height of the number
    before it, or at the bottom if there is none."""
    shown = False
    for steps, values, lost in rows:
        if not lost.any():
            continue
        at = int(np.flatnonzero(lost)[0])
        before = values[:at][np.isfinite(values[:at])]
        place = axes.transData if len(before) else axes.get_xaxis_transform()
        look = {"color": SPECIAL[NONFINITE], "marker": "x", "ls": "", "zorder": 5, "transform": place}
        axes.plot([steps[at]], [before[-1] if len(before) else 0.02], **look, label=FINDINGS[NONFINITE])
        if not shown:
            axes.annotate(
                f"{FINDINGS[NONFINITE]}, step {steps[at]}", (steps[at], 1), (3, -10), ("data", "axes fraction"),
                "offset points", color=SPECIAL[NONFINITE], fontsize="small",
            )  # fmt: skip
            shown = True


def _map(axes: Axes, grid: LayerGrid) -> Axes:
    """Draw a cell for each row and step; the stacks lie one above the other."""
    stacks = _stacks(grid)
    single = len(stacks) == 1 and grid.by_layer
    y = grid.layers if single else np.arange(1, len(grid.names) + 1)
    marks = findings(grid.values, grid.absent, grid.missing)
    log = logarithmic(grid.log, grid.values[(marks == 0) & np.isfinite(grid.values)])
    heat = Map(grid.steps.tolist(), y.tolist(), grid.values, marks, grid.label, log=log)
    mesh = draw_map(axes, heat)
    bar(_figure(axes), [axes], heat, mesh, BAR)
    axes.set(xlabel="step", ylabel="layer" if single else "")
    if not single:
        places = [_spaced(np.flatnonzero(grid.stacks == one)) for one in stacks]
        # the last row of a stack touches the first of the next one
        rows = [row for own in places[:-1] for row in own[: max(1, len(own) - 1)]] + places[-1]
        axes.set_yticks(y[rows], [grid.names[row] for row in rows])
    if handles := [
        Patch(facecolor=colour, edgecolor=INK, label=FINDINGS[mark])
        for mark, colour in SPECIAL.items()
        if (marks == mark).any()
    ]:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False)
        axes.set_title(axes.get_title(), loc="right")
    return axes


def _spaced(rows: np.ndarray) -> list[int]:
    return rows[np.unique(np.linspace(0, len(rows) - 1, TICKS).round().astype(int))].tolist()
