"""The files of a picture: PNG, SVG and PDF at the widths of one and two columns, a CSV of exactly what is drawn, and a
caption."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pyarrow import csv

from . import style
from .base import FINDINGS, Panel, Picture
from .caption import caption, small_print, tex
from .files import COLUMN, CONTROLS, KINDS, controls, paths, widths
from .heatmaps import ROW, SPECIAL, bar, draw_map
from .lines import LETTER, draw_lines, look, swatch
from .style import GREY, INK

__all__ = ["write"]

HEIGHT = 2.05  # inches a row of panels
TALL, LOW = 9.3, 1.3  # inches of a page, and of the lowest row of panels on it
MOST_COLUMNS = 4
DENSE = 0.75  # size of the letters of a page with more columns than its figure asks for, beside that of others
NARROWER = 0.8  # a map beside a colour bar has this share of its place
TITLE_LETTER, SMALL_LETTER = 0.07, 0.041  # inches that a letter of a title takes, and one of the small print
SMALL = 5.2  # points
_CANVASES = {"png": FigureCanvasAgg, "svg": FigureCanvasSVG, "pdf": FigureCanvasPdf}


def write(picture: Picture, folder: Path, name: str, title: str = "", source: str = "") -> dict[str, Path]:
    """Write all files of a figure into ``folder``, each whole or not at all, and return their :func:`paths`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = paths(folder, name, picture)
    words = {"caption.txt": f"{caption(picture, title, source)}\n", "tex": tex(picture, name, title, source)}
    for end, text in {**picture.extra, **words}.items():
        _put(files[end], lambda part, text=text: part.write_text(text, encoding="utf-8"))
    _put(files["csv"], lambda part: _table(picture, part))
    with matplotlib.rc_context():
        style.use_print_style()
        for width, suffix in widths(picture):
            drawn = draw(picture, width)
            drawn.draw_without_rendering()
            drawn.set_layout_engine("none")  # the layout stands; each format would compute it again
            for kind in KINDS:
                _put(files[kind + suffix], partial(_print, drawn, kind))
    for own in controls(picture):
        write(own, folder, f"{name}-{CONTROLS}", f"{title}, with controls" if title else "", source)
    return files


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a hidden name first, so that nobody sees a part of it."""
    part = path.with_name(f".{path.name}.tmp")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _table(picture: Picture, part: Path) -> None:
    """Write the CSV by Arrow, since pandas takes ten times as long for the maps of a long run, and piece by piece,
    since the maps of a large run have a million rows."""
    types = pa.Schema.from_pandas(picture.head(1), preserve_index=False)
    with csv.CSVWriter(part, types) as writer:
        for piece in picture.pieces():
            writer.write_table(pa.Table.from_pandas(piece, types, preserve_index=False))


def _print(drawn: Figure, kind: str, part: Path) -> None:
    """Print a figure whose layout is settled. ``Figure.savefig`` would draw it once more to compute the layout."""
    drawn.set_dpi(matplotlib.rcParams["savefig.dpi"])  # the last canvas may have left its own: maps are images in a PDF
    canvas = _CANVASES[kind](drawn)
    getattr(canvas, f"print_{kind}")(part, metadata=_dateless(kind))


def _dateless(kind: str) -> dict[str, Any]:
    """Return metadata that leave the date out, so that equal runs give equal files."""
    return {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})


def draw(picture: Picture, width: float) -> Figure:
    """Draws ``picture`` as a matplotlib figure ``width`` inches wide: one legend above the panels, panels in rows, one
    colour bar for maps with one scale, and the small print below."""
    columns = _columns(picture, width)
    font = DENSE if columns == MOST_COLUMNS > picture.columns else 1.0
    rows = math.ceil(len(picture.panels) / columns)
    entries = _entries(picture.panels)
    beside = max(1, int(width / (0.42 + LETTER * max(map(len, entries), default=0))))
    small = textwrap.wrap(small_print(picture), int(width / SMALL_LETTER))
    words = (0.17 * math.ceil(len(entries) / beside) + 0.08 if entries else 0.0) + 0.09 * len(small)
    heights = [max(map(_height, picture.panels[row * columns : (row + 1) * columns])) for row in range(rows)]
    if width > COLUMN and all(panel.map is None or not panel.map.y_names for panel in picture.panels):
        heights = [height * min(1, (TALL - words) / sum(heights)) for height in heights]
    drawn = Figure(figsize=(width, sum(heights) + words), layout="constrained")
    FigureCanvasAgg(drawn)
    maps = []
    for place, (panel, axes) in enumerate(zip(picture.panels, _grid(drawn, picture, columns, heights), strict=True)):
        across = columns if place < len(picture.panels) // columns * columns else _last_row(picture, columns)
        title = width / across * (1 if panel.map is None else NARROWER) / (TITLE_LETTER * font)
        upwards = 0.75 * heights[place // columns] / (LETTER * font)
        _frame(axes, panel, picture.letter(place), int(title), int(upwards), font)
        if place % columns and panel.map is None and panel.y == picture.panels[place - 1].y:
            axes.set_ylabel("")  # the panel on its left says it
        if panel.map is None:
            draw_lines(axes, panel, font)
        else:
            maps.append((axes, panel.map, draw_map(axes, panel.map)))
    _bars(drawn, maps, int(0.75 * min(heights) / (LETTER * font)), font)
    if entries:
        ncols = min(beside, len(entries))
        drawn.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=ncols)
    if small:
        drawn.supxlabel("\n".join(small), x=0.01, ha="left", fontsize=SMALL, color=GREY)
    return drawn


def _grid(drawn: Figure, picture: Picture, columns: int, heights: list[float]) -> list[Axes]:
    """Makes the axes of all panels, row by row."""
    last = _last_row(picture, columns)
    grid = drawn.add_gridspec(len(heights), math.lcm(columns, last), height_ratios=heights)
    found = []
    for place in range(len(picture.panels)):
        row, column = divmod(place, columns)
        wide = grid.ncols // (columns if (row + 1) * columns <= len(picture.panels) else last)
        found.append(drawn.add_subplot(grid[row, column * wide : (column + 1) * wide]))
    return found


def _last_row(picture: Picture, columns: int) -> int:
    """Count the places of the last row. If it is at least half full, its panels of lines share the whole width. Maps,
    and panels in a row less than half full, stay as wide as those above."""
    rest = len(picture.panels) % columns
    lines = all(panel.map is None for panel in picture.panels[len(picture.panels) - rest :])
    return rest if rest and 2 * rest >= columns and lines else columns


def _columns(picture: Picture, width: float) -> int:
    """Count the panels of a row: as many as the picture asks for, or more if it would not fit a page."""
    panels = len(picture.panels)
    if width <= COLUMN:
        return 1
    return min(panels, MOST_COLUMNS, max(picture.columns, math.ceil(panels * LOW / TALL)))


def _frame(axes: Axes, panel: Panel, letter: str, across: int, upwards: int, font: float) -> None:
    """Write title and axis labels, in lines of at most ``across`` and ``upwards`` letters. ``font``: size of letters of
    these axes, beside that of others."""
    words = [
        axes.set_title(textwrap.fill(letter + panel.title, across)),
        axes.set_xlabel(panel.x),
        axes.set_ylabel(textwrap.fill(panel.y, upwards)),
    ]
    if font != 1:
        for text in words:
            text.set_fontsize(font * float(text.get_fontsize()))
        axes.tick_params(labelsize=font * float(axes.get_xticklabels()[0].get_fontsize()))


def _bars(drawn: Figure, maps: list[tuple[Axes, Any, Any]], letters: int, font: float) -> None:
    """Gives maps with one scale one colour bar, and each other map its own."""
    scales: dict[object, list[tuple[Axes, Any, Any]]] = {}
    for place, one in enumerate(maps):
        heat = one[1]
        shared = heat.colours is not None
        scales.setdefault((heat.unit, heat.colours, heat.log, heat.centre) if shared else place, []).append(one)
    for own in scales.values():
        bar(drawn, [axes for axes, *_ in own], own[0][1], own[0][2], letters, font)


def _height(panel: Panel) -> float:
    """Estimate the height of a panel in inches: each named row of a map needs room for its name."""
    return HEIGHT if panel.map is None else max(HEIGHT, ROW * len(panel.map.y_names) + 0.75)


def _entries(panels: Iterable[Panel]) -> dict[str, Any]:
    """Collects legend entries of all panels, each label once. An entry has the dash of its lines if they have one."""
    entries: dict[str, Any] = {}
    panels, dashes = list(panels), dict[str, set[str]]()
    for one in (one for panel in panels for one in panel.series if one.kind == "line" and not one.faint):
        dashes.setdefault(one.label, set()).add(look(one)["dash"])
    for panel in panels:
        for one in panel.series:
            if one.kind == "crosses":  # in their own colour, or in that of the architecture of each
                entries.setdefault(one.label.rpartition(": ")[2], swatch({**look(one), "colour": one.colour or INK}))
            elif one.label and not one.faint and not panel.direct and _better(entries.get(one.label), look(one)):
                entries[one.label] = swatch(look(one), dashed=len(dashes.get(one.label, ())) < 2)
        if panel.map is not None:
            for finding, colour in SPECIAL.items():
                if (panel.map.finding == finding).any():
                    entries.setdefault(FINDINGS[finding], Patch(facecolor=colour, edgecolor=INK, linewidth=0.4))
    return entries


def _better(entry: Any, found: dict[str, Any]) -> bool:
    """Return True if a legend should take this look: it has none yet, or one without a marker, which grey print
    needs."""
    return entry is None or (entry.get_marker() == "none" and found["marker"] != "none")
