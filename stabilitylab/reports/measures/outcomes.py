"""Lines and crosses that show how runs ended along one axis: a line of those that learned, crosses for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..base import DIVERGED, STUCK, Series, Spread
from ..collection import Record, Runs
from .comparison import failed


def outcomes(
    runs: Runs,
    values: Mapping[str, float],
    at: Callable[[Record], float],
    name: str,
    *,
    bad: float,
    arch: str = "",
    **look: Any,
) -> list[Series]:
    """Draws the line ``name`` of ``values`` (run -> value) over ``at`` with the range over seeds, and crosses.

    ``bad``: the height of the cross of a run that diverged, which has no value.
    """
    spread = Spread()
    crosses: list[tuple[float, float]] = []
    for run in runs:
        value = values[run.name]
        if failed(run):
            crosses.append((at(run), value if math.isfinite(value) and run.verdict != "diverged" else bad))
        elif math.isfinite(value):
            spread.add([at(run)], [value])
    series = [spread.series(name, arch=arch, **look)] if spread.points else []
    if crosses:
        places, heights = zip(*sorted(crosses), strict=True)
        series.append(
            Series(f"{name}: diverged or stuck", places, heights, arch=arch, kind="crosses", seeds=len(runs.seeds),
                   **{key: value for key, value in look.items() if key == "colour"})
        )  # fmt: skip
    return series


def mark(diverged: int, stuck: int, n: int) -> int:
    """Mark a cell of ``n`` runs DIVERGED or STUCK, whichever is more frequent, if more than half failed; else 0."""
    if 2 * (diverged + stuck) <= n:
        return 0
    return DIVERGED if diverged >= stuck else STUCK


def worst(runs: Runs, values: Mapping[str, float]) -> float:
    """Return the largest value of the runs that did not diverge; the unigram baseline's cross-entropy if all did."""
    known = [values[run.name] for run in runs if run.verdict != "diverged" and math.isfinite(values[run.name])]
    return max(known, default=unigram(runs))


def unigram(runs: Runs) -> float:
    """Read the cross-entropy of the unigram baseline, the loss of runs that learned nothing; 1 if none is recorded."""
    known = (float(run.run.manifest.get("unigram", {}).get("cross_entropy", math.nan)) for run in runs)
    return next((value for value in known if math.isfinite(value)), 1.0)
