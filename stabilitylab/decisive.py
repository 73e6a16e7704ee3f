"""The decisive rows of curvature: diagnose, figures, headroom and the alarm read no others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# The largest relative residual of a converged eigenvalue: some eigenvalue lies that near. The rule of claim C56,
# committed before its runs.
CONVERGED = 0.05
# ``state`` of critical_sharpness: both sides of the crossing were seen, or one, or the loss changed less than its noise
FOUND, BOUND, NOISE = 1.0, 0.0, -1.0
EIGENVALUES = {"preconditioned_sharpness": ("value", "to_edge"), "sharpness": ("value",)}
CROSSINGS = {"critical_sharpness": ("value", "headroom", "critical_rate", "least", "most")}

Read = Callable[[str], np.ndarray | None]  # a column of the table; None where it was not recorded


def decisive(table: str, column: str, read: Read) -> np.ndarray | None:
    """Return a mask of the rows whose ``column`` is decisive; None if nothing is known against any row (the column
    needs no search, or the table has no facts about it).

    An eigenvalue is decisive if its residual is at most ``CONVERGED``. A critical rate is decisive if its ``state`` is
    ``FOUND``; in runs that were recorded without a state, if both ends of the crossing exist.
    """
    if column in EIGENVALUES.get(table, ()):
        residual, converged = read("residual"), read("converged")
        if residual is not None:
            return residual <= CONVERGED
        return None if converged is None else converged >= 1
    if column in CROSSINGS.get(table, ()):
        if (state := read("state")) is not None:
            return state >= FOUND
        low, high = read("low"), read("high")
        return None if low is None or high is None else np.isfinite(low) & np.isfinite(high) & (low > 0)
    return None
