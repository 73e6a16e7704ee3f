"""The relative difference of a place of two runs, estimated by sums with random signs, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .prints import PlacePrint


@dataclass(frozen=True)
class Gap:
    """||x_a - x_b|| / ||x_a|| as estimated by k sums, and its standard error. ``relative`` is 0 for equal sums, and inf
    if only one of the values is absent, 0 or not finite."""

    relative: float
    error: float = 0.0


def gap(a: PlacePrint, b: PlacePrint) -> Gap:
    r"""Return the relative difference of a place, sqrt(mean_j (z_j - z'_j)^2) / ||x_a||.

    The error is that of the mean over j, carried through the root: s / (2 sqrt(k) m) times the difference, with m and
    s^2 the mean and the variance of (z_j - z'_j)^2.
    """
    if a.absent or b.absent:
        return Gap(0.0 if a.absent and b.absent else math.inf)
    if len(a.sums) != len(b.sums):
        return Gap(math.nan)
    if np.array_equal(a.sums, b.sums, equal_nan=True):
        return Gap(0.0)
    squares = (a.sums - b.sums) ** 2
    mean = float(np.mean(squares))
    if not (math.isfinite(mean) and math.isfinite(a.norm)) or not a.norm:
        return Gap(math.inf)
    relative = math.sqrt(mean) / a.norm
    spread = float(np.std(squares, ddof=1)) if len(squares) > 1 else mean
    return Gap(relative, relative * spread / (2 * math.sqrt(len(squares)) * mean))
