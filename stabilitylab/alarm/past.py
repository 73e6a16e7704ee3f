"""The numbers of a place against its own past: level and noise, kept in a few numbers a place."""

from __future__ import annotations

from typing import Any

import numpy as np

SLOW, FAST = 0.02, 0.2  # weights of a new row: the past is about 50 rows, the present about 5
LEAST = 20  # rows of a past before rows are compared with it
FLOOR = 0.02  # the least noise, in the transformed unit: 2 % of a logarithm's argument
OUTLIER = 4.0  # standard deviations; a row beyond counts as one at this distance in the past


class Past:
    """Exponentially weighted mean m and variance s^2 of x, place by place; and a faster mean f.

    ``z`` = (x - m) / max(s, .02) of a row against the rows before it; ``drift`` = f - m, after the row was taken. A row
    beyond 4 s counts as 4 s for m and s, so that one spike is not the measure of the next. The first rows weigh 1/n.
    NaN where there is no finite number, or fewer than 20 rows before.
    """

    def __init__(self, places: int) -> None:
        self.mean, self.square, self.fast = np.zeros(places), np.zeros(places), np.zeros(places)
        self.rows = np.zeros(places, dtype=np.int64)

    def compare(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (z, drift) of this row, each (places,), and add the row to the past."""
        finite, known = np.isfinite(x), self.rows >= LEAST
        noise = np.maximum(np.sqrt(self.square), FLOOR)
        away = np.where(finite, x - self.mean, 0.0)
        z = np.where(finite & known, away / noise, np.nan)
        bounded = np.where(known, np.clip(away, -OUTLIER * noise, OUTLIER * noise), away)
        self.rows += finite
        first = 1.0 / np.maximum(self.rows, 1)
        slow, fast = (np.where(finite, np.maximum(weight, first), 0.0) for weight in (SLOW, FAST))
        self.mean += slow * bounded
        self.square = (1 - slow) * (self.square + slow * bounded**2)
        self.fast += fast * np.where(finite, x - self.fast, 0.0)
        drift = np.where(finite & known, self.fast - self.mean, np.nan)
        return z, drift

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in ("mean", "square", "fast", "rows")}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Past:
        past = cls(len(state["mean"]))
        past.mean, past.square, past.fast = (np.array(state[name], dtype=float) for name in ("mean", "square", "fast"))
        past.rows = np.array(state["rows"], dtype=np.int64)
        return past
