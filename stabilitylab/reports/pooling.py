"""Heat maps of long runs: at most so many columns, in which no spike is lost."""

from __future__ import annotations

import numpy as np

from .base import ABSENT, NONFINITE, ZERO

COLUMNS = 600


def findings(values: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """0 for a number like any other, ZERO, ABSENT (no gradient) or NONFINITE (NaN, inf), cell by cell."""
    found = np.where(values == 0, ZERO, 0)
    found = np.where(~np.isfinite(values), NONFINITE, found)
    return np.where(absent, ABSENT, found).astype(np.int8)


def pool(
    x: np.ndarray, values: np.ndarray, finding: np.ndarray, columns: int = COLUMNS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``values`` and ``finding`` (rows, n) at places ``x`` (n,) in at most ``columns`` groups of neighbours.

    A group shows its first place and its largest number; one that is not finite in it wins over any number, and zero
    or absent show only where nothing else is in it.
    """
    count = len(x)
    if count <= columns:
        return x, values, finding
    starts = np.unique(np.linspace(0, count, columns, endpoint=False).astype(int))
    usual = np.where(finding == 0, values, -np.inf)
    largest = np.maximum.reduceat(usual, starts, axis=1)
    has = {kind: np.logical_or.reduceat(finding == kind, starts, axis=1) for kind in (ZERO, ABSENT, NONFINITE)}
    empty = np.isneginf(largest)
    shown = np.where(has[ZERO] & empty, ZERO, np.where(empty, ABSENT, 0))
    shown = np.where(has[NONFINITE], NONFINITE, shown).astype(np.int8)
    return x[starts], np.where(shown == 0, largest, np.where(shown == ZERO, 0.0, np.nan)), shown
