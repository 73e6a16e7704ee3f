"""Figures: they turn runs into panels. Panels are data; ``paper`` prints them, ``screen`` makes them interactive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np

from ..experiments.sweeps import ROOM, ByFigure
from .kept import keepable

if TYPE_CHECKING:
    import pandas as pd

    from .collection import Runs

LEAST_SEEDS = 3  # least seeds of a point that is drawn full, with a band
ZERO, ABSENT, NONFINITE, DIVERGED, STUCK = 1, 2, 3, 4, 5  # in Map.finding; 0 is a number like any other
FINDINGS = {
    ZERO: "exactly 0", ABSENT: "no gradient", NONFINITE: "not finite", DIVERGED: "diverged", STUCK: "stuck",
}  # fmt: skip


class MissingRuns(Exception):
    """The error of a figure or claim that lacks its runs: a sentence, and the command that makes the runs."""

    def __init__(self, sentence: str, command: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.command = sentence, command


@keepable
@dataclass(frozen=True)
class Series:
    """A line, or points or crosses, with a band from ``low`` to ``high`` (the range over seeds).

    - ``label``: the entry in the legend. ``arch``: the label of the architecture that gives colour and marker.
    - ``seeds``: the number of seeds behind each point, one number for all points or one each. With fewer than
      LEAST_SEEDS, a point is hollow and has no band.
    - ``detail``: the meaning of the dash, if several lines have the same label.
    - ``faint``: True for a line that is drawn behind another one of its label, such as the raw numbers of a smoothed
      line. It is not in the legend.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    arch: str = ""
    dash: str = ""  # solid | dashed | dotted | dashdot; "": that of the architecture
    kind: Literal["line", "points", "crosses"] = "line"
    right: bool = False  # read on the right axis
    seeds: int | Sequence[int] = 1
    colour: str = ""  # needed if no architecture gives one
    marker: str = ""
    detail: str = ""
    faint: bool = False

    @property
    def name(self) -> str:
        return f"{self.label}, {self.detail}" if self.detail else self.label

    @property
    def counts(self) -> np.ndarray:
        """The number of seeds behind each point."""
        return np.broadcast_to(np.asarray(self.seeds, int), (len(self.x),))

    @property
    def band(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The two ends of the band, NaN at points with too few seeds; None if no point has a band."""
        if self.low is None or self.high is None or not (enough := self.counts >= LEAST_SEEDS).any():
            return None
        low, high = (np.where(enough, np.asarray(end, float), np.nan) for end in (self.low, self.high))
        return low, high


@keepable
@dataclass(frozen=True)
class Reference:
    """A labelled straight line: a saturation level, a threshold, a number that a paper states."""

    value: float
    label: str
    vertical: bool = False


@keepable
@dataclass(frozen=True)
class Origin:
    """The rows of a run's map: a probe's table, a stack, and the layer and sub-layer of each row."""

    table: str
    stack: str
    layers: Sequence[int]
    parts: Sequence[str] = ()  # sub-layers; none where rows are layers


@keepable
@dataclass(frozen=True)
class Map:
    """A heat map of ``z`` (rows, columns), with row i at ``y[i]`` and column j at ``x[j]``.

    - ``finding``: marks for cells that are not ordinary numbers: ZERO, ABSENT (no gradient), NONFINITE; or for cells
      that stand for runs: DIVERGED, STUCK.
    - ``x_names``, ``y_names``: names of columns and rows, which make the map a table. Columns and rows are then not
      placed on an axis (``x`` and ``y`` count them), and the first row is on top.
    - ``text``: (rows, columns), printed in the cells.
    - ``colours``: the range that the colours span; None: the range of the map's own numbers. ``centre``: the number
      from which the colours diverge to both sides.
    - ``seeds``: the number of seeds of a cell, one for all cells or one each; None: not stated.
    - ``origin``: the origin of the rows, in a map of one run.
    - ``square``: True for square cells, if rows and columns are the same things.
    """

    x: Sequence[float]
    y: Sequence[float]
    z: np.ndarray
    finding: np.ndarray
    unit: str
    log: bool = True
    x_names: Sequence[str] = ()
    y_names: Sequence[str] = ()
    text: np.ndarray | None = None
    colours: tuple[float, float] | None = None
    seeds: int | np.ndarray | None = None
    origin: Origin | None = None
    centre: float | None = None
    square: bool = False

    @property
    def usual(self) -> np.ndarray:
        """The cells (rows, columns) that have a colour of the scale, as True."""
        return (self.finding == 0) & np.isfinite(self.z) & ((self.z > 0) | (not self.log))


@keepable
@dataclass(frozen=True)
class Panel:
    """One pair of axes: ``title``, axis labels ``x`` and ``y``, and the ``series``, ``references`` and ``map`` drawn on
    them."""

    title: str
    x: str
    y: str
    series: Sequence[Series] = ()
    references: Sequence[Reference] = ()
    map: Map | None = None
    log_x: bool = False
    log_y: bool = False
    right: str = ""  # label of the right axis, where a series uses it
    log_right: bool = False
    ticks: Sequence[float] = ()  # all ticks of the x axis, if given
    direct: bool = False  # lines are named at their ends, not in a legend
    limits: tuple[float, float] | None = None  # of the left axis, if panels share it; None: by its numbers


def compared(panels: Iterable[Panel]) -> list[Panel]:
    """Return the panels with the same colours for all maps of one unit."""
    found = list(panels)
    shown: dict[str, list[np.ndarray]] = {}
    for panel in found:
        if panel.map is not None:
            shown.setdefault(panel.map.unit, []).append(panel.map.z[panel.map.usual])
    spans = {unit: np.concatenate(values) for unit, values in shown.items()}
    colours = {unit: (float(own.min()), float(own.max())) for unit, own in spans.items() if own.size}
    return [
        panel if panel.map is None else replace(panel, map=replace(panel.map, colours=colours.get(panel.map.unit)))
        for panel in found
    ]


@keepable
@dataclass(frozen=True)
class Picture:
    """The result of a figure: panels, one sentence with the finding, and notes on the runs that were drawn and left
    out.

    ``columns``: panels per row at full width. ``controls``: panels that no paper draws, which are printed into files of
    their own. ``extra``: further files, end of the name (such as table.md) -> text. ``provenance``: the common settings
    of the runs. ``band``: the meaning of bands and bars. ``key``: the meaning of marks in cells.
    """

    panels: Sequence[Panel]
    finding: str
    notes: Sequence[str] = ()
    columns: int = 2
    extra: Mapping[str, str] = field(default_factory=dict)
    controls: Sequence[Panel] = ()
    provenance: str = ""
    band: str = "range over seeds"
    key: str = ""

    @property
    def whole(self) -> Picture:
        """The picture with its controls as further panels, as the page shows it."""
        apart = [replace(panel, title=f"With controls: {panel.title}") for panel in self.controls]
        return replace(self, panels=[*self.panels, *apart], controls=()) if apart else self

    def letter(self, place: int) -> str:
        """Return the letter in front of a panel's title, such as "(a) "; "" for a single panel and for more than 26."""
        return f"({chr(ord('a') + place)}) " if 1 < len(self.panels) <= 26 else ""

    def frame(self) -> pd.DataFrame:
        """Return exactly what is drawn, one row per point: panel, series, axis, x, y, low, high, seeds, finding."""
        import pandas as pd  # here, as whoever lists the runs of a figure reads its file too

        pieces = [piece for panel in self.panels for piece in _drawn(panel)]
        return pd.concat(pieces, ignore_index=True).loc[:, COLUMNS] if pieces else pd.DataFrame(columns=COLUMNS)

    def head(self, count: int) -> pd.DataFrame:
        """Return the first ``count`` rows of :meth:`frame` without making the others: the maps of one run have a
        million."""
        import pandas as pd

        pieces = [piece for panel in self.panels for piece in _drawn(panel, max(count, 1))]
        if not pieces:
            return pd.DataFrame(columns=COLUMNS)
        return pd.concat(pieces, ignore_index=True).loc[:, COLUMNS].head(count)  # of the types that the whole has

    def pieces(self) -> Iterator[pd.DataFrame]:
        """Yield the rows of :meth:`frame` in pieces, each with the types of the whole."""
        types = self.head(1).dtypes
        for panel in self.panels:
            for piece in _drawn(panel):
                yield piece.loc[:, COLUMNS].astype(types)

    @property
    def rows(self) -> int:
        """The number of rows of :meth:`frame`."""
        maps = sum(panel.map.z.size for panel in self.panels if panel.map is not None)
        return maps + sum(len(panel.references) + sum(len(one.x) for one in panel.series) for panel in self.panels)


COLUMNS = ["panel", "series", "axis", "x", "y", "low", "high", "seeds", "finding"]  # of a figure's table


def _drawn(panel: Panel, most: int | None = None) -> Iterator[pd.DataFrame]:
    """Yield what a panel draws. With ``most``, yield only the first ``most`` rows of each line, or a few more of a
    map."""
    import pandas as pd

    for one in panel.series:
        low, high = one.band or (None, None)
        content = {"x": one.x, "y": one.y, "low": low, "high": high}
        data = pd.DataFrame({key: value if value is not None else np.nan for key, value in content.items()})
        axis = panel.right if one.right else panel.y
        told = data.assign(panel=panel.title, series=one.name, axis=axis, seeds=one.counts, finding=one.kind)
        yield told if most is None else told.head(most)
    if panel.map is not None:
        heat = panel.map if most is None else _beginning(panel.map, most)
        rows = len(heat.y)
        names = np.array(["", *FINDINGS.values()])
        seeds = np.nan if heat.seeds is None else heat.seeds
        yield pd.DataFrame(
            {
                "panel": panel.title,
                "series": _cells(panel, heat),
                "axis": heat.unit,
                "x": np.tile(np.asarray(heat.x, float), rows),
                "y": heat.z.ravel(),
                "low": np.nan,
                "high": np.nan,
                "seeds": np.broadcast_to(np.asarray(seeds), heat.z.shape).ravel(),
                "finding": names[heat.finding.astype(int).ravel()],
            }
        )
    for line in panel.references:
        where = {"x": line.value, "y": np.nan} if line.vertical else {"x": np.nan, "y": line.value}
        yield pd.DataFrame([where]).assign(
            panel=panel.title, series=line.label, axis=panel.y, low=np.nan, high=np.nan, seeds=0, finding="reference"
        )


def _beginning(heat: Map, most: int) -> Map:
    """Return the first rows of a map that have at least ``most`` cells together; the whole map if it has fewer."""
    kept = slice(0, -(-most // max(len(heat.x), 1)))
    seeds = heat.seeds[kept] if isinstance(heat.seeds, np.ndarray) and heat.seeds.ndim == 2 else heat.seeds
    cut = {"y": heat.y[kept], "z": heat.z[kept], "finding": heat.finding[kept], "y_names": heat.y_names[kept]}
    return replace(heat, seeds=seeds, **cut)


def _cells(panel: Panel, heat: Map) -> list[str]:
    """Return the name of each cell, row by row: that of its row, and that of its column if the column has one."""
    rows = list(heat.y_names) or [f"{panel.y} {place:g}" for place in heat.y]
    columns = [f", {name}" for name in heat.x_names] or [""] * len(heat.x)
    return [row + column for row in rows for column in columns]


class Figure:
    """A figure of a paper, drawn as a measurement. Subclass it, decorate the subclass with :func:`figure`, and write
    ``picture``."""

    id: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]

    def picture(self, runs: Runs) -> Picture:
        """Return the picture of these runs. Raises :class:`MissingRuns` if there is nothing to draw."""
        raise NotImplementedError


FIGURES: ByFigure[type[Figure]] = ByFigure("figure", ROOM)
F = TypeVar("F", bound=type[Figure])


def figure(id: str, *, title: str, source: str) -> Callable[[F], F]:
    """Register a figure class: ``@figure("branchnorm:8", title=..., source="BranchNorm, Figure 8")``."""

    def decorate(cls: F) -> F:
        cls.id, cls.title, cls.source = id, title, source
        FIGURES.register(id)(cls)
        return cls

    return decorate


@dataclass
class Spread:
    """Gathers values of several seeds at each x, and draws them as a line with the range over seeds."""

    log: bool = False  # the middle is a geometric mean
    points: dict[float, list[float]] = field(default_factory=dict)

    def add(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Adds one seed's values."""
        for place, value in zip(x, y, strict=True):
            self.points.setdefault(float(place), []).append(float(value))

    def series(self, label: str, *, arch: str = "", **look: object) -> Series:
        places = sorted(self.points)
        values = [np.asarray(self.points[place]) for place in places]
        with np.errstate(divide="ignore", invalid="ignore"):
            middle = [float(np.exp(np.log(v).mean())) if self.log else float(v.mean()) for v in values]
        several = any(len(v) > 1 for v in values)
        low, high = ([float(f(v)) for v in values] if several else None for f in (np.min, np.max))
        counts = [len(v) for v in values]
        seeds = counts[0] if len({*counts}) == 1 else counts
        return Series(label, places, middle, low, high, arch=arch, seeds=seeds, **look)  # type: ignore[arg-type]
