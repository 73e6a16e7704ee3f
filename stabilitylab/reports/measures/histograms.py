"""Draws the histograms of a place as ridges over the steps, and finds the places whose histogram moved most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...histograms import COLUMNS, HIGH, LOW, NONFINITE, TABLES, ZERO
from ...inputs import expression
from ..base import Panel, Series
from ..collection import Record
from ..style import PARTS

RIDGES = 12  # rows that are drawn at most
HIGHEST = 1.4  # spaces between two ridges that the highest bin of a panel takes
SIDES = {"positive": ("solid", PARTS[1]), "negative": ("dashed", PARTS[4])}
LOST = "#d7191c"
MIDDLES = np.exp2(np.arange(LOW - 1, HIGH + 1) + 0.5)  # of "below", the powers of two and "above"


@dataclass(frozen=True)
class Ridges:
    """The panel of one place, and what it cannot show: exact zeros, and numbers that are not finite.

    ``distance``: how far the histogram moved between the first and the last recorded row, in powers of two.
    ``height``: the share of the entries that a ridge as high as the space between two ridges would stand for.
    """

    what: str  # such as "gradients of lm_head.weight"
    panel: Panel
    distance: float
    height: float
    zeros: tuple[float, int]  # the largest share of exact zeros, and its step
    lost: tuple[float, int]  # that of NaN and inf

    def named(self, run: str) -> Panel:
        return replace(self.panel, title=f"{run}: {self.panel.title}") if run else self.panel

    def notes(self, run: str) -> Iterator[str]:
        """Yield sentences on the height of the ridges and on what is not drawn."""
        what = f"{run}: {self.what}" if run else self.what
        found = (("exact zeros", self.zeros), ("not finite", self.lost))
        told = [f"at step {step} {_percent(share)} are {name}" for name, (share, step) in found if share > 0]
        rest = f" Not drawn: {'; '.join(told)}." if told else ""
        high = f"a rise as high as the space between two ridges is {_percent(self.height)} of its entries"
        yield f"{what[:1].upper()}{what[1:]}: {high}.{rest}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def pattern_of(chosen: str) -> re.Pattern[str]:
    """Return the regular expression of names of places. Raises UsageError for a bad one."""
    return expression(chosen, "--place", "one that names of places match, such as ffn or lm_head")


def ridges(record: Record, table: str, *, most: int, chosen: str = "") -> list[Ridges]:
    """Return the ridges of ``most`` places of a table of histograms: those whose histogram moved most between the first
    and the last recorded row, of the half with the most entries; or the first ones whose name the regular expression
    ``chosen`` matches.

    [] for a run without the table, and where no place matches or has an entry to draw. Raises UsageError for a bad
    expression.
    """
    if table not in record.run.tables or not len(steps := record.probed(table)):
        return []
    pattern = pattern_of(chosen)
    drawn = steps
    if len(steps) > RIDGES:  # evenly spaced steps, of rows that may be dense at first
        wanted = np.linspace(steps[0], steps[-1], RIDGES)
        drawn = np.unique(steps[np.abs(steps[None] - wanted[:, None]).argmin(1)])
    data = record.run.frame_at(table, [int(step) for step in drawn])
    sites = data["site"].astype(str).to_numpy()
    names = list(dict.fromkeys(sites.tolist()))
    counts = data[list(COLUMNS)].to_numpy(float).reshape(len(drawn), len(names), len(COLUMNS))
    counts = np.nan_to_num(counts)  # a gradient that was absent
    distance = distances(counts[0], counts[-1])
    if chosen:
        places = [at for at, name in enumerate(names) if pattern.search(name)]
    else:
        entries = counts[-1].sum(1)
        small = entries < np.median(entries)  # a gain that passes an edge moves a whole bin at once
        places = np.lexsort((-distance, small)).tolist()
    found = (_ridges(table, names[at], drawn, counts[:, at], float(distance[at])) for at in places)
    return [one for one, _ in zip((one for one in found if one is not None), range(most), strict=False)]


def distances(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return how far histograms (places, columns) lie apart, (places,): the earth mover's distance of the sizes of
    their entries, both signs together, in powers of two; and the change of the share of NaN and inf, times all powers.

    Exact zeros have no size and are left out. 0 where either has no entry with a size. Our definition."""
    sizes, lost = zip(*map(_sizes, (before, after)), strict=True)
    held = (sizes[0].sum(1) > 0) & (sizes[1].sum(1) > 0)
    shares = [size / np.maximum(size.sum(1), 1)[:, None] for size in sizes]
    moved = np.abs(np.cumsum(shares[0] - shares[1], axis=1)).sum(1)
    return np.where(held, moved, 0.0) + np.abs(lost[0] - lost[1]) * len(MIDDLES)


def _sizes(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries by size, (places, sizes), and the share that is not finite, (places,)."""
    size = counts[:, ZERO + 1 : NONFINITE] + counts[:, ZERO - 1 :: -1]
    return size, counts[:, NONFINITE] / np.maximum(counts.sum(1), 1)


def _ridges(table: str, site: str, steps: np.ndarray, counts: np.ndarray, distance: float) -> Ridges | None:
    """Draw the histograms (steps, columns) of a place; None if no number has a size."""
    total = counts.sum(1)
    shares = counts / np.where(total > 0, total, 1)[:, None]
    sides = {"positive": shares[:, ZERO + 1 : NONFINITE], "negative": shares[:, ZERO - 1 :: -1]}
    held = np.flatnonzero(sum(side.sum(0) for side in sides.values()))
    if not len(held):
        return None
    cut = slice(max(int(held[0]) - 1, 0), int(held[-1]) + 2)
    space = float(steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
    height = max(float(side.max()) for side in sides.values()) / HIGHEST
    lines = list(_lines(steps, {name: side[:, cut] for name, side in sides.items()}, MIDDLES[cut], space / height))
    broken = steps[shares[:, NONFINITE] > 0].tolist()
    if broken:
        x = [float(MIDDLES[cut][-1])] * len(broken)
        lines.append(Series("not finite", x, broken, kind="crosses", colour=LOST, marker="x"))
    what = f"{TABLES[table]} of {site}"
    panel = Panel(what, "size of an entry", "step", lines, log_x=True)
    worst = [(float(shares[:, at].max()), int(steps[shares[:, at].argmax()])) for at in (ZERO, NONFINITE)]
    return Ridges(what, panel, distance, height, worst[0], worst[1])


def _lines(steps: np.ndarray, sides: dict[str, np.ndarray], x: np.ndarray, scale: float) -> Iterator[Series]:
    """Yield a line for each row and side that has an entry, on top of the row's step; the last rows first, so that
    the earlier ones stand before them."""
    for at in range(len(steps) - 1, -1, -1):
        for name, side in sides.items():
            if side.any():
                dash, colour = SIDES[name]
                y = float(steps[at]) + scale * side[at]
                yield Series(name, x.tolist(), y.tolist(), colour=colour, dash=dash, marker="none")
