"""The first difference of two runs: its step, place and number in order of dependence, and how fast it grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..bisect import Bisection
from ..bisect.prints import TABLES, RunPrints
from ..bisect.stored import common_steps, of_prints
from ..errors import InputError, UsageError
from ..histograms import TABLES as HISTOGRAMS
from ..schema import Row
from ..store import Run
from ..store.layout import flat
from ..store.reader import of_snapshots
from .evidence import Evidence, Grid
from .order import CLOCKS, describe, rank

LEVELS = (1e-6, 1e-3, 0.01, 0.1, 0.5)  # relative differences whose first step the growth table gives
MISSING = "(not set)"


@dataclass(frozen=True)
class Difference:
    """One number in which the runs differ: where it stands, both values, and |a - b| / max(|a|, |b|)."""

    step: int
    phase: str
    probe: str
    place: Row
    a: float | None  # None: absent ("no gradient")
    b: float | None
    relative: float

    @property
    def where(self) -> str:
        return describe(self.place) if self.place.site or self.place.stack or self.place.layer else "the whole model"

    def sentence(self) -> str:
        shown = ["absent" if value is None else f"{value:.9g}" for value in (self.a, self.b)]
        return (
            f"step {self.step}, {self.phase}: {self.probe} of {self.where} is {shown[0]} and {shown[1]} "
            f"(relative difference {self.relative:.3g})"
        )


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    ``sketched``: what the sums with random signs say of the first row in which they differ; None if no common row has
    them, or if none differs. ``first``: the first difference, by step and by what numbers depend on.
    ``first_in_table``: the first difference among tables, which name a place. ``identical_through``: the last common
    step before ``first``. ``growth``: level -> the first difference above that level.
    """

    a: str
    b: str
    rtol: float
    atol: float
    compared: Mapping[str, int]  # metric or table column -> number of common steps
    identical_through: int | None
    last_common: int | None
    first: Difference | None
    first_in_table: Difference | None
    growth: Mapping[float, Difference | None]
    settings: Mapping[str, tuple[Any, Any]]
    only: Mapping[str, Mapping[str, Any]]  # "a" | "b" -> what only that run has
    sketched: Bisection | None = None

    def __str__(self) -> str:
        return self.paragraph

    @property
    def paragraph(self) -> str:
        tolerance = "bit for bit" if not (self.rtol or self.atol) else f"within rtol {self.rtol:g}, atol {self.atol:g}"
        if self.first is None:
            return (
                f"{self.a} and {self.b} are identical {tolerance} through step {self.last_common}, the last common one."
            )
        words = [f"{self.a} and {self.b} part at {self.first.sentence()}."]
        if self.identical_through is None:
            words.append("No earlier step is common to both runs.")
        else:
            words.append(f"Identical {tolerance} through step {self.identical_through}.")
        table = self.first_in_table
        if table is not None and table is not self.first:
            words.append(f"The first table to differ: {table.sentence()}.")
        return " ".join((*words, *self.placed()))

    def placed(self) -> list[str]:
        """Return sentences about the place that differs first. Sums with random signs show the place; norms do not."""
        if self.sketched is None:
            if self.first_in_table is None or self.first_in_table.phase not in ("forward", "backward"):
                return []
            return ["Norms alone do not show the place: record both runs with the probe fingerprint, and bisect them."]
        return [*self.sketched.sentences()[:2], f"Read from their fingerprints at step {self.sketched.step}."]

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "sketched"} | {
            "first": self.first and asdict(self.first),
            "first_in_table": self.first_in_table and asdict(self.first_in_table),
            "sketched": self.sketched and self.sketched.as_dict(),
            "paragraph": self.paragraph,
            "growth": [{"above": level, "first": one and asdict(one)} for level, one in self.growth.items()],
            "settings": {key: {"a": a, "b": b} for key, (a, b) in self.settings.items()},
        }


def compare(a: Run, b: Run, *, rtol: float = 0.0, atol: float = 0.0) -> Comparison:
    """Compare what both runs have recorded so far. NaN equals NaN; "no gradient" equals only "no gradient".

    Numbers differ where |a - b| > ``atol`` + ``rtol`` max(|a|, |b|). Raises InputError if the
    runs have no step in common.
    """
    return of_snapshots(lambda left, right: _compared(left, right, rtol, atol), a, b)


def _compared(a: Run, b: Run, rtol: float, atol: float) -> Comparison:
    left, right = Evidence(a), Evidence(b)
    pairs = list(_pairs(left, right))
    if not any(len(one.steps) for one, _ in pairs):
        raise InputError(f"{a.path} and {b.path} have no recorded step in common: compare runs of the same cadence.")
    gaps = [_gap(*pair, rtol, atol) for pair in pairs]
    firsts = [_first(*pair, gap, 0.0) for pair, gap in zip(pairs, gaps, strict=True)]
    first = _earliest(firsts)
    first_in_table = _earliest([one for one, (grid, _) in zip(firsts, pairs, strict=True) if not grid.is_metric])
    steps = sorted({int(step) for one, _ in pairs for step in one.steps})
    before = [step for step in steps if first is None or step < first.step]
    growth = {
        level: _earliest([_first(*pair, gap, level) for pair, gap in zip(pairs, gaps, strict=True)]) for level in LEVELS
    }
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        rtol=rtol,
        atol=atol,
        compared={one.name: len(one.steps) for one, _ in pairs},
        identical_through=before[-1] if before else None,
        last_common=steps[-1] if steps else None,
        first=first,
        first_in_table=first_in_table,
        growth=growth,
        settings=settings(a.config, b.config),
        only=only(left, right),
        sketched=None if first is None else sketched(a, b),
    )


def sketched(a: Run, b: Run) -> Bisection | None:
    """Bisect two runs at the first common row in which their fingerprints differ; None if there is none."""
    try:
        steps = common_steps((a, b))
    except UsageError:
        return None
    ours, theirs = RunPrints(a), RunPrints(b)
    each = (of_prints((ours.at(step), theirs.at(step))) for step in steps)
    return next((found for found in each if found.verdict != "identical"), None)


def settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by flat name: the values of both runs."""
    ours, theirs = dict(flat(a)), dict(flat(b))
    names = dict.fromkeys((*ours, *theirs))
    both = {name: (ours.get(name, MISSING), theirs.get(name, MISSING)) for name in names}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def recorded(evidence: Evidence) -> set[str]:
    """Return the tables that hold rows. A table of the run may have none."""
    return {name for name in evidence.run.tables if evidence.grid(name) is not None}


def only(left: Evidence, right: Evidence) -> dict[str, dict[str, Any]]:
    """Return the tables, the metrics and the number of steps that only one of the runs has."""
    found = {}
    for name, ours, theirs in (("a", left, right), ("b", right, left)):
        metrics = [m for m in ours.metrics.column_names if m not in theirs.metrics.column_names and m not in CLOCKS]
        steps = np.setdiff1d(ours.steps, theirs.steps)
        found[name] = {
            "tables": sorted(recorded(ours) - recorded(theirs)),
            "metrics": metrics,
            "steps": len(steps),
            "first_step": int(steps[0]) if len(steps) else None,
        }
    return found


def _pairs(left: Evidence, right: Evidence) -> Iterator[tuple[Grid, Grid]]:
    """Yield each column that both runs have, cut to their common steps and places."""
    for name in left.metrics.column_names[1:]:
        if name not in CLOCKS and (pair := _common(left.metric(name), right.metric(name))):
            yield pair
    for table in left.run.tables:
        if table in right.run.tables:
            if table in HISTOGRAMS:
                left.read_whole(table)
                right.read_whole(table)
            is_print = table in TABLES.values()  # whose sums are compared by :func:`sketched`
            for column in ("norm",) if is_print else left.run.table(table).columns:
                if pair := _common(left.grid(table, column), right.grid(table, column)):
                    yield pair


def _common(a: Grid | None, b: Grid | None) -> tuple[Grid, Grid] | None:
    if a is None or b is None:
        return None
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    spot = {row: index for index, row in enumerate(b.rows)}
    ours = [place for place, row in enumerate(a.rows) if row in spot]
    rows = [a.rows[place] for place in ours]
    theirs = [spot[row] for row in rows]

    def cut(grid: Grid, at: np.ndarray, places: list[int]) -> Grid:
        chosen = np.ix_(at, np.array(places))
        return replace(grid, steps=steps, rows=tuple(rows), values=grid.values[chosen], absent=grid.absent[chosen])

    return (cut(a, at_a, ours), cut(b, at_b, theirs)) if rows else None


def _gap(a: Grid, b: Grid, rtol: float, atol: float) -> np.ndarray:
    """Return |a - b| / max(|a|, |b|) where a and b differ by more than the tolerance, else 0. (S, R)

    The gap is inf where only one of them is absent, and where they differ and one of them is not finite.
    """
    x, y = a.values, b.values
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.maximum(np.abs(x), np.abs(y))
        difference = np.abs(x - y)
        relative = np.divide(difference, size, out=np.zeros_like(size), where=size > 0)
        finite = np.isfinite(x) & np.isfinite(y)
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | (finite & (difference <= atol + rtol * size))
    relative[~finite] = np.inf  # a different finding, not a larger number
    relative[same & (a.absent == b.absent)] = 0.0
    relative[a.absent & b.absent] = 0.0
    relative[a.absent != b.absent] = np.inf
    return relative


def _first(a: Grid, b: Grid, gap: np.ndarray, above: float) -> Difference | None:
    """Return the first step at which the gap is larger than ``above``, and the place that is computed first there."""
    over = gap > above
    rows = np.flatnonzero(over.any(axis=1))
    if not len(rows):
        return None
    at = int(rows[0])
    places = np.flatnonzero(over[at])
    place = int(places[-1] if a.phase == "backward" else places[0])
    values = [None if grid.absent[at, place] else float(grid.values[at, place]) for grid in (a, b)]
    return Difference(int(a.steps[at]), a.phase, a.name, a.rows[place], values[0], values[1], float(gap[at, place]))


def _earliest(differences: Sequence[Difference | None]) -> Difference | None:
    """Return the earliest difference by step and phase. Within a phase a table comes before a metric, since a table
    names a place."""
    found = [one for one in differences if one is not None]
    return min(found, key=lambda one: (one.step, rank(one.phase), "." not in one.probe), default=None)
