"""Lines, points and crosses of a panel, drawn with matplotlib and seaborn, with bands that are our intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from . import style
from .base import LEAST_SEEDS, Panel, Series
from .style import GREY, INK

HOLLOW = "white"
LETTER = 0.052  # inches that a letter of a legend or label takes
NARROWEST = 0.3  # share of their width that axes keep beside names at line ends
MOST_MARKERS = 12  # on a line; more points than that would hide it
PATTERNS = {"solid": "", "dashed": (3.7, 1.6), "dotted": (1, 1.4), "dashdot": (5, 1.6, 1, 1.6)}  # in line widths
PLAIN = (1e-3, 1e5)  # between these, the number at a tick is written out
ROOM = 1.5  # factor from a single point to either end of its logarithmic axis
FEW = 1.6  # decades; an axis of fewer has ticks at 1, 2 and 5
APART = 0.075  # least distance of names at line ends, as a share of the axes' height
LONG = 15  # letters; a longer name at a line's end may be broken into two rows
MOVED, LEADER = 0.02, 8  # share of the height by which a name moves before it gets a leader; points of its width
KEY, KEY_LETTER, KEY_SWATCH = 5.8, 0.046, 0.34  # points of a panel's key; inches that a letter and a swatch of it take


def look(one: Series) -> dict[str, Any]:
    """Return colour, dash and marker of a line in print, and the colour inside its marker."""
    own = style.style(one.arch or one.label)
    face = one.colour or own.face
    shown = face if (one.counts >= LEAST_SEEDS).any() else HOLLOW
    shape = "x" if one.kind == "crosses" else (one.marker or own.marker)
    dash = (one.dash or own.dash) if one.kind == "line" else "none"
    return {"colour": one.colour or own.colour, "dash": dash, "marker": shape, "face": face,
            "shown": shown}  # fmt: skip


def swatch(found: dict[str, Any], dashed: bool = True) -> Line2D:
    """Makes a legend's entry."""
    line = found["dash"] == "none" or dashed
    return Line2D([], [], color=found["colour"], linestyle=found["dash"] if line else "solid", marker=found["marker"],
                  **_edge(found, found["shown"]))  # fmt: skip


def _edge(found: dict[str, Any], face: str) -> dict[str, Any]:
    return {"markerfacecolor": face, "markeredgecolor": found["colour"],
            "markeredgewidth": 1.2 if found["marker"] == "x" else 0.7}  # fmt: skip


def draw_lines(axes: Axes, panel: Panel, font: float = 1.0) -> None:
    """Draw a panel without a map: the scales of its axes, then lines and marks, then ticks and names. ``font``: size of
    the letters at references, beside that of others."""
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log", nonpositive="mask")
    sides = {False: axes}
    if any(one.right for one in panel.series):
        sides[True] = right = axes.twinx()
        right.set_ylabel(panel.right)
        right.set_yscale("log" if panel.log_right else "linear")
        right.grid(visible=False)
        right.spines["right"].set_visible(True)
    for side, target in sides.items():
        own = [one for one in panel.series if one.right == side]
        names = (axes.get_xlabel(), target.get_ylabel())
        _draw(target, own)
        target.set(xlabel=names[0], ylabel=names[1])  # seaborn has named them
    if panel.limits:
        axes.set_ylim(*panel.limits)
    _details(axes, panel)
    for line in panel.references:
        _reference(axes, line.value, line.label, line.vertical, 6 * font)
    _ticks(axes, panel)
    if panel.direct:
        name_ends(axes, panel)


def _draw(axes: Axes, own: list[Series]) -> None:
    """Draw lines, their bands and their marks; a mark is hollow if few seeds are behind its point."""
    looks = [look(one) for one in own]
    thin: dict[str, Any] = {"alpha": 0.3, "linewidth": 0.6}
    for faint in (True, False):
        lines = [_stretches(one, found) for one, found in zip(own, looks, strict=True) if one.faint == faint]
        lines = [data for data in lines if len(data)]
        if lines:
            data = pd.concat(lines, keys=range(len(lines)), names=["line"]).reset_index(level="line")
            data["stretch"] = data["line"].astype(str) + "." + data["stretch"]
            sns.lineplot(
                data, x="x", y="y", hue="colour", style="dash", units="stretch", estimator=None, sort=False,
                palette={colour: colour for colour in data["colour"].unique()},
                dashes={dash: PATTERNS[dash] for dash in data["dash"].unique()},
                legend=False, ax=axes, **(thin if faint else {}),
            )  # fmt: skip
    for one, found in zip(own, looks, strict=True):
        _bands(axes, one, found["colour"])
        _marks(axes, one, found)


def _stretches(one: Series, found: dict[str, Any]) -> pd.DataFrame:
    """List the points of a line in stretches: a point that is not finite ends a stretch, so that it leaves a gap."""
    if one.kind != "line":
        return pd.DataFrame()
    data = pd.DataFrame({"x": np.asarray(one.x, float), "y": np.asarray(one.y, float)})
    whole = np.isfinite(data["y"].to_numpy())
    data["colour"], data["dash"], data["stretch"] = found["colour"], found["dash"], (~whole).cumsum().astype(str)
    return data.loc[whole]


def _bands(axes: Axes, one: Series, colour: str) -> None:
    if one.band is None:
        return
    if one.kind == "line" and len(one.x) > 1:
        axes.fill_between(np.asarray(one.x, float), *one.band, color=colour, alpha=0.16, linewidth=0)
    else:
        axes.vlines(one.x, *one.band, color=colour, linewidth=0.8)


def _marks(axes: Axes, one: Series, found: dict[str, Any]) -> None:
    if one.faint or found["marker"] == "none":
        return
    every = max(1, math.ceil(len(one.x) / MOST_MARKERS))
    x, y, marked = np.asarray(one.x, float), np.asarray(one.y, float), np.arange(len(one.x)) % every == 0
    for enough in (False, True):
        points = marked & ((one.counts >= LEAST_SEEDS) == enough)
        face = _edge(found, found["face"] if enough else HOLLOW)
        axes.plot(x[points], y[points], color=found["colour"], linestyle="none", marker=found["marker"], **face)


def _details(axes: Axes, panel: Panel) -> None:
    """Add a key to the dashes of this panel, if its lines have several. It is between the title and the axes, where it
    covers no line."""
    meant = {one.detail: look(one)["dash"] for one in panel.series if one.detail and not one.faint}
    if len(meant) < 2 or panel.direct:
        return
    lines = [Line2D([], [], color=INK, linestyle=dash, linewidth=0.9) for dash in meant.values()]
    beside = max(1, min(len(meant), int(_width(axes) / (KEY_SWATCH + KEY_LETTER * max(map(len, meant))))))
    axes.legend(lines, list(meant), loc="lower left", bbox_to_anchor=(0, 1), ncols=beside, fontsize=KEY,
                handlelength=2.2, labelspacing=0.25, columnspacing=1.2, borderpad=0, borderaxespad=0.3)  # fmt: skip
    place = matplotlib.rcParams["axes.titlelocation"]
    rows = math.ceil(len(meant) / beside)
    axes.set_title(axes.get_title(place), pad=matplotlib.rcParams["axes.titlepad"] + 1.4 * KEY * rows)


def _reference(axes: Axes, value: float, label: str, vertical: bool, size: float) -> None:
    look = {"color": GREY, "linewidth": 0.7, "linestyle": (0, (4, 2)), "zorder": 1}
    words = {"textcoords": "offset points", "color": INK, "fontsize": size}
    if vertical:
        axes.axvline(value, **look)
        right = _across(axes, value) > 0.6  # then the words are on the left of the line, so that they stay in the axes
        height, offset = _free(axes, value, label, right)
        side = {"xytext": (-2, offset), "ha": "right"} if right else {"xytext": (2, offset)}
        axes.annotate(label, (value, height), xycoords=("data", "axes fraction"), **side, **words)
    else:
        axes.axhline(value, **look)
        axes.annotate(label, (1, value), xycoords=("axes fraction", "data"), xytext=(-2, 2), ha="right", **words)


def _free(axes: Axes, value: float, label: str, right: bool) -> tuple[float, float]:
    """Return the place of the words beside a vertical line, as a share of the height and points from there: at the top,
    unless a line of the panel runs there and none at the bottom or in the middle."""
    size = axes.get_window_extent()
    wide, high = LETTER * len(label) * axes.figure.dpi / size.width, 9 * axes.figure.dpi / 72 / size.height  # pyright: ignore
    at = _across(axes, value)
    left, end = (at - wide, at) if right else (at, at + wide)
    crossed = []
    for line in axes.get_lines():
        points = np.column_stack([np.asarray(part, float) for part in line.get_data()])
        if len(points) and line.get_transform() == axes.transData:
            places = axes.transAxes.inverted().transform(axes.transData.transform(points))
            places = places[np.isfinite(places).all(axis=1)]
            if len(places):
                inside = np.linspace(max(left, places[:, 0].min()), min(end, places[:, 0].max()), 20)
                crossed += np.interp(inside, *places.T).tolist() if inside[0] <= inside[-1] else []
    for height, offset, low in ((1.0, -7.0, 1 - high), (0.0, 3.0, 0.0), (0.5, -3.0, 0.5 - high / 2)):
        if not any(low <= y <= low + high for y in crossed):
            return height, offset
    return 1.0, -7.0


def _across(axes: Axes, x: float) -> float:
    """The place of an x between the left end of the axes, 0, and the right one, 1."""
    at = axes.transData.transform((x, axes.get_ylim()[0]))
    return float(axes.transAxes.inverted().transform(at)[0])


def plain(value: float, _: object = None) -> str:
    """Write the number at a tick: 0.6, 200, or digits times a power of ten if that would be long."""
    if value == 0 or PLAIN[0] <= abs(value) < PLAIN[1]:
        return f"{value:.10g}"
    digits, _, power = f"{value:.3e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    times = "" if digits == "1" else rf"{digits}{{\times}}"
    return f"${times}10^{{{int(power)}}}$"


def _ticks(axes: Axes, panel: Panel) -> None:
    if panel.log_y:
        _plainly(axes.yaxis, *axes.get_ylim())
    if panel.ticks:
        low, high = axes.get_xlim()
        if panel.log_x and high < 1.01 * low:  # of a single point, for which a logarithmic axis leaves no room
            axes.set_xlim(low / ROOM, high * ROOM)
        axes.set_xticks(list(panel.ticks), _apart(axes, panel))
        axes.xaxis.set_minor_locator(NullLocator())
    elif panel.log_x:
        _plainly(axes.xaxis, *axes.get_xlim())
    else:
        whole = all(float(x).is_integer() for one in panel.series for x in one.x)
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=whole))


def _apart(axes: Axes, panel: Panel) -> list[str]:
    """Write the last tick and, from the left, the ticks that have room; the others stay marks without a number. The
    room is that which names at line ends will leave."""
    level = 0.0 if axes.get_yscale() == "linear" else 1.0
    places = axes.transData.transform([(tick, level) for tick in panel.ticks])[:, 0]
    named = [row for name, _ in _named(axes, panel) for row in name.split("\n")] if panel.direct else []
    left = max(NARROWEST, 1 - LETTER * max(map(len, named), default=0) / _width(axes))
    inches = (places * left / axes.get_figure().dpi).tolist()  # pyright: ignore
    labels, free = [], -math.inf
    last = inches[-1] - LETTER * (len(f"{panel.ticks[-1]:g}") / 2 + 1)
    for tick, place in zip(panel.ticks, inches, strict=True):
        half = LETTER * len(f"{tick:g}") / 2
        fits = place - half >= free and (place + half <= last or place == inches[-1])
        labels.append(f"{tick:g}" if fits else "")
        free = place + half + LETTER if fits else free
    return labels


def decades(low: float, high: float) -> Locator:
    """Place the ticks of a logarithmic axis: at powers of ten; on an axis of less than FEW decades also at 2 and 5
    times those; on a shorter one at round numbers."""
    span = math.log10(high / low) if 0 < low < high else math.inf
    if span < 0.6:
        return MaxNLocator(nbins=5)
    return LogLocator(subs=(1, 2, 5)) if span < FEW else LogLocator(numticks=7)


def _plainly(axis: Any, low: float, high: float) -> None:
    axis.set_major_locator(decades(low, high))
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(NullFormatter())


def _named(axes: Axes, panel: Panel) -> list[tuple[str, Series]]:
    """List the lines that get a name at their ends. If a name would take half of the axes, long names are broken into
    two rows, if there is room for these."""
    named = [one for one in panel.series if one.kind == "line" and one.label and not one.faint]
    shared = Counter(one.label for one in named)
    names = [one.name if shared[one.label] > 1 else one.label for one in named]
    if LETTER * max(map(len, names), default=0) > _width(axes) / 2:
        broken = [_in_rows(name) for name in names]
        names = broken if APART * sum(1 + name.count("\n") for name in broken) <= 1 else names
    return list(zip(names, named, strict=True))


def _in_rows(name: str) -> str:
    """Breaks a long name behind its last colon or comma."""
    head, sign, tail = next((cut for cut in map(name.rpartition, (": ", ", ")) if cut[1]), ("", "", name))
    return f"{head}{sign.strip()}\n{tail}" if head and len(name) > LONG else name


def _width(axes: Axes) -> float:
    """Return the width in inches, before the layout takes some for names beside the axes."""
    return axes.get_position().width * axes.figure.get_figwidth()  # pyright: ignore


def name_ends(axes: Axes, panel: Panel, size: float = 6) -> None:
    """Write each line's name beside its last point, in the line's colour: its label, with its detail if several lines
    have that label. Names that would overlap move apart, and a thin line leads from the end to a name that moved."""
    axes.get_ylim()  # settles the limits, by which places are computed
    ends: dict[str, tuple[float, str]] = {}
    for name, one in _named(axes, panel):
        y = np.asarray(one.y, float)
        known = np.flatnonzero(np.isfinite(y) & ((y > 0) | (not panel.log_y)))
        if len(known):
            at = axes.transAxes.inverted().transform(axes.transData.transform((one.x[known[-1]], y[known[-1]])))
            ends.setdefault(name, (float(at[1]), look(one)["colour"]))
    places = spread_out([at for at, _ in ends.values()], [APART * (1 + name.count("\n")) for name in ends])
    moves = [abs(place - end) > MOVED for (end, _), place in zip(ends.values(), places, strict=True)]
    indent = LEADER if any(moves) else 3
    for (name, (end, colour)), place, moved in zip(ends.items(), places, moves, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
        axes.annotate(name, (1, end), xycoords="axes fraction", xytext=(indent, place),
                      textcoords=("offset points", "axes fraction"), va="center", color=colour, fontsize=size,
                      annotation_clip=False, arrowprops=leader if moved else None)  # fmt: skip


def spread_out(places: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Move things of these sizes at places between 0 and 1 apart until none covers another. Their order stays; each
    cluster is centred on its mean, and kept between 0 and 1 as far as it fits."""
    order = sorted(range(len(places)), key=places.__getitem__)
    clusters: list[list[int]] = []

    def middle(members: list[int]) -> float:
        half = min(span(members), 1.0) / 2
        return min(max(sum(places[one] for one in members) / len(members), half), 1 - half)

    def span(members: list[int]) -> float:
        return sum(sizes[one] for one in members)

    for one in order:
        members = [one]
        while clusters:
            earlier = clusters[-1]
            if middle(members) - middle(earlier) >= (span(members) + span(earlier)) / 2:
                break
            members = [*clusters.pop(), *members]
        clusters.append(members)
    found = [0.0] * len(places)
    for members in clusters:
        low = middle(members) - span(members) / 2
        for one in members:
            found[one] = low + sizes[one] / 2
            low += sizes[one]
    return found
