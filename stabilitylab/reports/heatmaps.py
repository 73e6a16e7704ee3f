"""The map of a panel: seaborn's heat map if rows or columns are named, else cells placed on axes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator, NullFormatter, NullLocator

from .base import ABSENT, DIVERGED, NONFINITE, STUCK, ZERO, Map
from .lines import decades, plain

ROW = 0.135  # inches that a named row of a map takes at least
SPECIAL = {ZERO: "#ffffff", ABSENT: "#bdbdbd", NONFINITE: "#d7191c", DIVERGED: "#d7191c", STUCK: "#bdbdbd"}
ALONG, AROUND = "viridis", "vlag"  # seaborn's map whose middle is nearly white, for what is above or below a number


def scale(heat: Map) -> Any:
    """Return the scale from numbers to colours: over the map's own range, or the range that it shares; around a
    centre it goes equally far to both sides."""
    shown = heat.z[heat.usual]
    low, high = heat.colours or ((float(shown.min()), float(shown.max())) if shown.size else (1.0, 10.0))
    if heat.centre is not None:
        reach = max(abs(low - heat.centre), abs(high - heat.centre)) or 1.0
        return colors.Normalize(heat.centre - reach, heat.centre + reach)
    if low == high:
        low, high = (low / 1.05, high * 1.05) if heat.log else (low - 0.5, high + 0.5)
    return colors.LogNorm(low, high) if heat.log else colors.Normalize(low, high)


def draw_map(axes: Axes, heat: Map) -> Any:
    """Draw the cells, a finding's cells in the colour of the finding; return what a colour bar is made of."""
    axes.grid(visible=False)
    palette = sns.color_palette(AROUND if heat.centre is not None else ALONG, as_cmap=True)
    looks = [(heat.usual, heat.z, {"norm": scale(heat), "cmap": palette})]
    for finding in (finding for finding in SPECIAL if (heat.finding == finding).any()):
        one = colors.ListedColormap([SPECIAL[finding]])
        looks.append((heat.finding == finding, np.ones(heat.z.shape), {"cmap": one, "vmin": 0, "vmax": 1}))
    draw = _table if heat.x_names or heat.y_names else _placed
    meshes = [draw(axes, heat, cells, values, look) for cells, values, look in looks]
    sns.despine(ax=axes, left=True, bottom=True)
    return meshes[0]


def _table(axes: Axes, heat: Map, cells: np.ndarray, values: np.ndarray, look: dict[str, Any]) -> Any:
    """Draw named rows and columns, the first row on top, and the text in the cells."""
    text = np.full(heat.z.shape, "") if heat.text is None else np.asarray(heat.text, dtype=str)
    rows, columns = (pd.Index(names or [f"{at:g}" for at in places], name=label) for names, places, label in (
        (heat.y_names, heat.y, axes.get_ylabel()), (heat.x_names, heat.x, axes.get_xlabel())))  # fmt: skip
    sns.heatmap(
        pd.DataFrame(values, rows, columns), mask=~cells, annot=text, fmt="", annot_kws={"fontsize": _size(axes, text)},
        cbar=False, square=heat.square, linewidths=0.4, xticklabels=True, yticklabels=True, ax=axes, **look,
    )  # fmt: skip
    axes.tick_params(length=0, rotation=0)
    if _across(axes, rows, columns) > 1:
        axes.tick_params(axis="x", rotation=90)
    return axes.collections[-1]


def _across(axes: Axes, rows: pd.Index, columns: pd.Index) -> float:
    """Return how many times wider than its cell the longest name of a column is. The names of rows, for which the
    layout makes room later, leave the cells less."""
    letter = 0.62 * float(axes.get_xticklabels()[0].get_fontsize())
    width = axes.get_window_extent().width / axes.figure.dpi * 72 - letter * max(len(str(row)) for row in rows)
    longest = letter * max(len(str(column)) for column in columns)
    return longest * len(columns) / width if width > 0 else 2.0


def _size(axes: Axes, text: np.ndarray) -> float:
    """Finds how large text can be in these cells, in points."""
    found = [cell.split("\n") for cell in text.ravel()]
    letters, lines = max((len(line) for cell in found for line in cell), default=1) or 1, max(map(len, found))
    box, inch = axes.get_window_extent(), axes.figure.dpi / 72
    width, height = box.width / inch / text.shape[1], box.height / inch / text.shape[0]
    return max(3.5, min(6.5, width / (0.62 * letters), height / (1.15 * lines)))


def _placed(axes: Axes, heat: Map, cells: np.ndarray, values: np.ndarray, look: dict[str, Any]) -> Any:
    """Draw each cell at its place on the axes: steps need not be equally far apart."""
    axes.yaxis.set_major_locator(_whole(heat.y, nbins=6))
    if heat.square:
        axes.set_aspect("equal")
        axes.xaxis.set_major_locator(_whole(heat.x, nbins=6))
    elif all(float(x).is_integer() for x in heat.x):
        axes.xaxis.set_major_locator(_whole(heat.x, nbins="auto", steps=[1, 2, 2.5, 5, 10]))
    shown = np.ma.masked_where(~cells, values)
    return axes.pcolormesh(_edges(heat.x), _edges(heat.y), shown, rasterized=True, **look)


def _whole(places: Sequence[float], **how: Any) -> Locator:
    """Place ticks at whole numbers; for a single place, there alone."""
    return FixedLocator(list(places)) if len(places) == 1 else MaxNLocator(integer=True, **how)


def bar(drawn: Figure, places: Sequence[Axes], heat: Map, mesh: Any, letters: int, font: float = 1.0) -> None:
    """Draws one colour bar for the maps at ``places``, its unit in lines of so many ``letters``. ``font``: size of
    its letters, beside that of others."""
    shape = {"fraction": 0.06, "aspect": 25} if len(places) == 1 else {"fraction": 0.04, "aspect": 40}
    found = drawn.colorbar(mesh, ax=list(places), pad=0.02, **shape)
    found.set_label(textwrap.fill(heat.unit, letters), fontsize=6.5 * font)
    found.ax.tick_params(labelsize=6 * font)
    found.formatter, found.minorformatter = FuncFormatter(plain), NullFormatter()
    shown = np.unique(heat.z[heat.usual])
    if len(shown) == 1 and heat.colours is None:  # a single number has a single tick
        found.locator, found.minorlocator = FixedLocator(shown.tolist()), NullLocator()
        found.formatter = FuncFormatter(lambda value, _: plain(float(f"{value:.3g}")))
    elif heat.log:
        found.locator = decades(mesh.norm.vmin, mesh.norm.vmax)
    found.update_ticks()
    found.outline.set_linewidth(0.4)  # type: ignore[operator]


def _edges(centres: Sequence[float]) -> np.ndarray:
    """Puts cell borders half-way between centres."""
    places = np.asarray(centres, float)
    if len(places) == 1:
        return np.array([places[0] - 0.5, places[0] + 0.5])
    middle = (places[1:] + places[:-1]) / 2
    return np.concatenate([[2 * places[0] - middle[0]], middle, [2 * places[-1] - middle[-1]]])
