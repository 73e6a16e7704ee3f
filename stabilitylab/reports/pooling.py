"""Reduction of long runs to a picture: maps with few columns and lines with few points, in which no spike is lost."""

from __future__ import annotations

import itertools

import numpy as np

from .base import ABSENT, NONFINITE, ZERO

COLUMNS = 600


def findings(values: np.ndarray, absent: np.ndarray, missing: np.ndarray | None = None) -> np.ndarray:
    """Mark each cell: 0 for an ordinary number, ZERO, ABSENT (no gradient) or NONFINITE (NaN, inf).

    A cell that is ``missing`` has no mark and no number: 0, and NaN in ``values``."""
    found = np.where(values == 0, ZERO, 0)
    found = np.where(~np.isfinite(values), NONFINITE, found)
    found = np.where(absent, ABSENT, found).astype(np.int8)
    return found if missing is None else np.where(missing, 0, found).astype(np.int8)


def group_starts(count: int, groups: int) -> np.ndarray:
    """Return the starts of at most ``groups`` groups of neighbours, all of about one size."""
    return np.unique(np.linspace(0, count, min(count, groups), endpoint=False).astype(int))


def pool(
    x: np.ndarray, values: np.ndarray, finding: np.ndarray, columns: int = COLUMNS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pool ``values`` and ``finding`` (rows, n) at places ``x`` (n,) in at most ``columns`` groups of neighbours.

    A group shows its first place and its largest number. A number in it that is not finite wins over any other; zero
    or absent show only if the group has no ordinary number. A group of missing cells is a missing cell.
    """
    if len(x) <= columns:
        return x, values, finding
    starts = group_starts(len(x), columns)
    usual = np.where((finding == 0) & ~np.isnan(values), values, -np.inf)
    largest = np.maximum.reduceat(usual, starts, axis=1)
    has = {kind: np.logical_or.reduceat(finding == kind, starts, axis=1) for kind in (ZERO, ABSENT, NONFINITE)}
    empty = np.isneginf(largest)
    shown = np.where(has[ZERO] & empty, ZERO, np.where(has[ABSENT] & empty, ABSENT, 0))
    shown = np.where(has[NONFINITE], NONFINITE, shown).astype(np.int8)
    numbers = np.where(empty, np.nan, largest)
    return x[starts], np.where(shown == 0, numbers, np.where(shown == ZERO, 0.0, np.nan)), shown


def thin(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Pick points that draw a line as all its points would; a value that is not finite becomes NaN, a gap."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= 5 * columns:
        return x, y
    kept = telling(y, y, y, columns)
    return x[kept], y[kept]


def telling(y: np.ndarray, low: np.ndarray, high: np.ndarray, groups: int) -> np.ndarray:
    """Return the indices of each group's first and last point, first gap, lowest ``low`` and highest ``high``, so that
    no spike is lost."""
    kept: set[int] = set()
    borders = [*group_starts(len(y), groups).tolist(), len(y)]
    for start, end in itertools.pairwise(borders):
        known = np.isfinite(y[start:end])
        kept |= {start, end - 1}
        if known.any():
            kept |= {
                start + int(np.argmin(np.where(known, low[start:end], np.inf))),
                start + int(np.argmax(np.where(known, high[start:end], -np.inf))),
            }
        if not known.all():
            kept.add(start + int(np.argmin(known)))
    return np.array(sorted(kept))
