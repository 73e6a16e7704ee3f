"""The rows that are probed: a pure function of the row number, so that an interrupted run goes on as it began."""

from __future__ import annotations

import math
from typing import Literal

from ...errors import UsageError

FINENESS, REFERENCE_FINENESS = 10, 5
EVERY, LONG = 200, 20_000  # "auto": rows are 200 updates apart, and beyond row 20,000 1 % of the row number apart
Cadence = int | Literal["log"]
CurvatureCadence = int | Literal["auto", "log"]


def checked(every: int | str, name: str) -> Cadence:
    if every == "log":
        return "log"
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every
    raise UsageError(f"{name} = {every!r} must be a number of steps, at least 1, or 'log'.")


def is_due(row: int, every: Cadence, fineness: int = FINENESS) -> bool:
    """Return True if a row is due. ``every`` n: rows 0, n, 2n, ...; ``"log"``: row 0, then from row n to n + max(1,
    ceil(n / fineness)).

    The training pass has fineness 10: 0, 1, ..., 11, 13, 15, ..., at least 10 % apart; the reference pass, which costs
    forward passes of its own, 5: 0, 1, ..., 6, 8, 10, 12, 15, ..., at least 20 % apart.
    """
    if every != "log":
        return row % every == 0
    due = 0
    while due < row:
        due += max(1, math.ceil(due / fineness))
    return due == row


def checked_curvature(every: CurvatureCadence) -> CurvatureCadence:
    return "auto" if every == "auto" else checked(every, "curvature_every")


def is_curved(row: int, every: CurvatureCadence) -> bool:
    """Return True if curvature is due. ``"auto"``: every 200th row up to 20,000, then 1 % apart; ``"log"``: row 0, then
    20 % apart; n: every n-th."""
    if every != "auto":
        return is_due(row, every, REFERENCE_FINENESS)
    if row <= LONG:
        return row % EVERY == 0
    due = LONG
    while due < row:
        due += math.ceil(due / 100)
    return due == row
