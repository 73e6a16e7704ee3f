"""Prints pictures on paper: PNG, SVG and PDF at the widths of one and two columns, and a CSV of exactly what is
drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from pyarrow import csv

from . import style
from .base import ABSENT, DIVERGED, FINDINGS, LEAST_SEEDS, NONFINITE, STUCK, ZERO, Map, Panel, Picture, Series
from .style import GREY, INK

COLUMN, PAGE = 3.25, 6.75  # inches: one column of two, and the page's text width
WIDTHS = ((PAGE, ""), (COLUMN, "-column"))
KINDS = ("png", "svg", "pdf")
HEIGHT = 2.05  # inches a row of panels
LETTER, TITLE_LETTER = 0.052, 0.07  # inches that a letter of a legend or label takes, and one of a title
MOST_MARKERS = 12  # on a line; more points than that would hide it
ROW = 0.135  # inches that a named row of a map takes at least
SPECIAL = {ZERO: "#ffffff", ABSENT: "#bdbdbd", NONFINITE: "#d7191c", DIVERGED: "#d7191c", STUCK: "#bdbdbd"}


def paths(folder: Path, name: str, extra: Iterable[str] = ()) -> dict[str, Path]:
    """Lists the files of a figure: csv, what it has in ``extra``, and png, svg, pdf at page width and (png-column, ...)
    at column width."""
    files = {"csv": folder / f"{name}.csv", **{end: folder / f"{name}-{end}" for end in extra}}
    return files | {f"{kind}{suffix}": folder / f"{name}{suffix}.{kind}" for _, suffix in WIDTHS for kind in KINDS}


def write(picture: Picture, folder: Path, name: str) -> dict[str, Path]:
    """Write all files of a figure, each whole or not at all; returns their :func:`paths`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = paths(folder, name, picture.extra)
    for end, text in picture.extra.items():
        _put(files[end], lambda part, text=text: part.write_text(text, encoding="utf-8"))
    # pandas takes ten times as long for the maps of a long run
    table = pa.Table.from_pandas(picture.frame(), preserve_index=False)
    _put(files["csv"], lambda part: csv.write_csv(table, part))
    with matplotlib.rc_context():
        style.use_print_style()
        for width, suffix in WIDTHS:
            drawn = draw(picture, width)
            drawn.draw_without_rendering()
            drawn.set_layout_engine("none")  # the layout stands; each format would compute it again
            for kind in KINDS:
                save = partial(drawn.savefig, format=kind, metadata=_dateless(kind))
                _put(files[kind + suffix], save)
    return files


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Writes under a hidden name first, so that nobody sees a part of it."""
    part = path.with_name(f".{path.name}.tmp")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _dateless(kind: str) -> dict[str, Any]:
    """Leaves the date out, so that equal runs give equal files."""
    return {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})


def draw(picture: Picture, width: float) -> Figure:
    """Draws ``picture`` as a matplotlib figure ``width`` inches wide; panels in rows, one legend below for all of
    them."""
    columns = min(len(picture.panels), picture.columns if width > COLUMN else 1)
    rows = math.ceil(len(picture.panels) / columns)
    entries = _entries(picture.panels)
    beside = max(1, int(width / (0.42 + LETTER * max(map(len, entries), default=0))))
    legend = 0.17 * math.ceil(len(entries) / beside) + 0.08 if entries else 0.0
    heights = [max(map(_height, picture.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
    drawn = Figure(figsize=(width, sum(heights) + legend), layout="constrained")
    FigureCanvasAgg(drawn)
    grid = drawn.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for place, axes in enumerate(grid.flat):
        if place < len(picture.panels):
            _panel(axes, picture.panels[place], picture.letter(place), letters=int(width / columns / TITLE_LETTER))
        else:
            axes.set_axis_off()
    if entries:
        ncols = min(beside, len(entries))
        drawn.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=ncols)
    return drawn


def _height(panel: Panel) -> float:
    """Estimates the inches that a panel needs: its named rows are read one by one."""
    return HEIGHT if panel.map is None else max(HEIGHT, ROW * len(panel.map.y_names) + 0.75)


def _entries(panels: Sequence[Panel]) -> dict[str, Any]:
    """Collects legend entries of all panels, each label once."""
    scratch = Figure().subplots()
    entries: dict[str, Any] = {}
    for panel in panels:
        for one in panel.series:
            if one.label and one.label not in entries:
                look = _look(one)
                if one.detail and one.kind == "line":
                    look["linestyle"] = "solid"
                entries[one.label] = scratch.plot([], [], **look)[0]
        if panel.map is not None:
            present = set(np.unique(panel.map.finding).astype(int))
            for finding, colour in SPECIAL.items():
                if finding in present:
                    entries.setdefault(FINDINGS[finding], Patch(facecolor=colour, edgecolor=INK, linewidth=0.4))
    return entries


def _look(one: Series) -> dict[str, Any]:
    look = style.style(one.arch or one.label)
    colour = one.colour or look.colour
    dash = one.dash or look.dash
    shape = "x" if one.kind == "crosses" else (one.marker or look.marker)
    return {
        "color": colour,
        "linestyle": dash if one.kind == "line" else "none",
        "marker": shape,
        "markerfacecolor": colour if look.filled and (one.counts >= LEAST_SEEDS).any() else "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.2 if one.kind == "crosses" else 0.7,
    }


def _panel(axes: Axes, panel: Panel, letter: str, letters: int) -> None:
    axes.set_title(textwrap.fill(letter + panel.title, letters), loc="left")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(textwrap.fill(panel.y, int(0.75 * HEIGHT / LETTER)))
    if panel.map is not None:
        _map(axes, panel.map)
    else:
        if panel.log_x:
            axes.set_xscale("log")
        if panel.log_y:
            axes.set_yscale("log", nonpositive="mask")
        right = axes.twinx() if any(one.right for one in panel.series) else None
        if right is not None:
            right.set_ylabel(panel.right)
            right.set_yscale("log" if panel.log_right else "linear")
            right.grid(visible=False)
            right.spines["right"].set_visible(True)
        for one in panel.series:
            _series(right if one.right and right is not None else axes, one)
    _details(axes, panel)
    for line in panel.references:
        _reference(axes, line.value, line.label, line.vertical)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), [f"{tick:g}" for tick in panel.ticks])
        axes.minorticks_off()
    elif not panel.log_x and panel.map is None:
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=_whole(panel)))


def _details(axes: Axes, panel: Panel) -> None:
    """Says what the dashes of this panel mean, where labels alone do not say it."""
    meant = {one.detail: one.dash or "solid" for one in panel.series if one.detail}
    if len(meant) > 1:
        looks: list[dict[str, Any]] = [{"color": INK, "linestyle": dash, "linewidth": 0.9} for dash in meant.values()]
        lines = [Line2D([], [], **look) for look in looks]
        axes.legend(lines, list(meant), loc="best", fontsize=5.8, handlelength=2.2, labelspacing=0.25, borderpad=0.2)


def _whole(panel: Panel) -> bool:
    return all(float(x).is_integer() for one in panel.series for x in one.x)


def _series(axes: Axes, one: Series) -> None:
    look = _look(one)
    every = max(1, math.ceil(len(one.x) / MOST_MARKERS))
    x, y, marked = np.asarray(one.x, float), np.asarray(one.y, float), np.arange(len(one.x)) % every == 0
    axes.plot(x, y, **{**look, "marker": "none"})
    for hollow, points in ((True, marked & (one.counts < LEAST_SEEDS)), (False, marked & (one.counts >= LEAST_SEEDS))):
        face = {"markerfacecolor": "white"} if hollow else {}
        axes.plot(x[points], y[points], **{**look, "linestyle": "none", **face})
    if one.band is None:
        return
    if one.kind == "line" and len(one.x) > 1:
        axes.fill_between(x, *one.band, color=look["color"], alpha=0.16, linewidth=0)
    else:
        axes.vlines(x, *one.band, color=look["color"], linewidth=0.8)


def _reference(axes: Axes, value: float, label: str, vertical: bool) -> None:
    if vertical:
        axes.axvline(value, color=GREY, linewidth=0.7, linestyle=(0, (4, 2)))
        axes.annotate(label, (value, 1), xycoords=("data", "axes fraction"), xytext=(2, -7),
                      textcoords="offset points", color=INK, fontsize=6)  # fmt: skip
    else:
        axes.axhline(value, color=GREY, linewidth=0.7, linestyle=(0, (4, 2)))
        axes.annotate(label, (1, value), xycoords=("axes fraction", "data"), xytext=(-2, 2),
                      textcoords="offset points", ha="right", color=INK, fontsize=6)  # fmt: skip


def _map(axes: Axes, heat: Map) -> None:
    axes.grid(visible=False)
    shown = np.where(heat.usual, heat.z, np.nan)
    own = (float(np.nanmin(shown)), float(np.nanmax(shown))) if heat.usual.any() else (1.0, 10.0)
    low, high = heat.colours or own
    if low == high:
        low, high = (low / 1.05, high * 1.05) if heat.log else (low - 0.5, high + 0.5)
    scale = colors.LogNorm(low, high) if heat.log else colors.Normalize(low, high)
    x, y = _edges(heat.x), _edges(heat.y)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    mesh = axes.pcolormesh(x, y, np.ma.masked_invalid(shown), norm=scale, cmap="viridis", rasterized=True)
    present = [finding for finding in SPECIAL if (heat.finding == finding).any()]
    for finding in present:
        flat = np.where(heat.finding == finding, 1.0, np.nan)
        one = colors.ListedColormap([SPECIAL[finding]])
        axes.pcolormesh(x, y, np.ma.masked_invalid(flat), cmap=one, rasterized=True)
    _named(axes, heat)
    if heat.text is not None:
        _print(axes, heat, np.where(np.isfinite(shown), scale(np.ma.masked_invalid(shown)).filled(1.0), 1.0))
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, fraction=0.06)
    bar.set_label(heat.unit, fontsize=6.5)
    bar.ax.tick_params(labelsize=6)
    bar.outline.set_linewidth(0.4)  # type: ignore[operator]


def _named(axes: Axes, heat: Map) -> None:
    """Sets the ticks of a table: its columns' and rows' names, the first row on top."""
    if heat.x_names:
        axes.set_xticks(list(heat.x), list(heat.x_names))
    if heat.y_names:
        axes.set_yticks(list(heat.y), list(heat.y_names))
        axes.invert_yaxis()
    for named, ticks in ((heat.x_names, axes.xaxis), (heat.y_names, axes.yaxis)):
        if named:
            ticks.set_tick_params(length=0)


def _print(axes: Axes, heat: Map, shade: np.ndarray) -> None:
    """Prints the text of each cell, as large as the cells allow; light where ``shade`` is a dark colour."""
    text = np.asarray(heat.text, dtype=str)
    letters = max((len(line) for cell in text.ravel() for line in cell.split("\n")), default=1) or 1
    box, dpi = axes.get_window_extent(), axes.figure.dpi
    width, height = box.width / dpi, box.height / dpi  # inches
    lines = max((cell.count("\n") + 1 for cell in text.ravel()), default=1)
    size = min(6.5, 72 * width / text.shape[1] / (0.58 * letters), 72 * height / text.shape[0] / (1.15 * lines))
    for (i, j), words in np.ndenumerate(text):
        if words:
            dark = int(heat.finding[i, j]) == DIVERGED or shade[i, j] < 0.6
            axes.text(heat.x[j], heat.y[i], words, ha="center", va="center", fontsize=max(size, 3.5),
                      color="white" if dark else "black")  # fmt: skip


def _edges(centres: Sequence[float]) -> np.ndarray:
    """Puts cell borders half-way between centres."""
    places = np.asarray(centres, float)
    if len(places) == 1:
        return np.array([places[0] - 0.5, places[0] + 0.5])
    middle = (places[1:] + places[:-1]) / 2
    return np.concatenate([[2 * places[0] - middle[0]], middle, [2 * places[-1] - middle[-1]]])
