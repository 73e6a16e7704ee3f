"""The lowest mean of a place so far: by how much the present is above it, and for how long nothing came below it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .past import FAST, LEAST


class Lowest:
    """The lowest of the fast means f of x, place by place; f weighs the last 5 rows or so (weight .2 of a new row).

    ``rise`` = f - min f over all rows from the 20th on, up to and with this one. ``stall`` = the share of the rows so
    far that came after the row of that minimum, between 0 and 1. Both are without a scale if x is a logarithm. NaN
    where there is no finite number, or fewer than 20 rows before.
    """

    def __init__(self, places: int) -> None:
        self.fast, self.least = np.zeros(places), np.full(places, np.inf)
        self.rows, self.at = np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.int64)

    def compare(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rise, stall) of this row, each (places,), which is added first."""
        finite, known = np.isfinite(x), self.rows >= LEAST
        self.rows += finite
        weight = np.where(finite, np.maximum(FAST, 1.0 / np.maximum(self.rows, 1)), 0.0)
        self.fast += weight * np.where(finite, x - self.fast, 0.0)
        lower = finite & known & (self.fast < self.least)
        self.least, self.at = np.where(lower, self.fast, self.least), np.where(lower, self.rows, self.at)
        told = finite & known
        rise = np.subtract(self.fast, self.least, out=np.full(len(x), np.nan), where=told)
        stall = np.divide(self.rows - self.at, self.rows, out=np.full(len(x), np.nan), where=told)
        return rise, stall

    def state_dict(self) -> dict[str, Any]:
        least = [None if np.isinf(own) else float(own) for own in self.least]  # JSON has no infinity
        return {"fast": self.fast.tolist(), "least": least, "rows": self.rows.tolist(), "at": self.at.tolist()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Lowest:
        lowest = cls(len(state["fast"]))
        lowest.fast = np.array(state["fast"], dtype=float)
        lowest.least = np.array([np.inf if own is None else own for own in state["least"]], dtype=float)
        lowest.rows, lowest.at = (np.array(state[name], dtype=np.int64) for name in ("rows", "at"))
        return lowest
