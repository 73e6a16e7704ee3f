"""Level and noise of a series that falls, jumps and spikes."""

from __future__ import annotations

import numpy as np

from .thresholds import LEVEL_ROWS

SD_OF_MAD = 1.4826  # of a normal distribution


def level(values: np.ndarray, rows: int = LEVEL_ROWS) -> np.ndarray:
    """The median of each row and the ``rows`` - 1 before it."""
    first = [np.median(values[: at + 1]) for at in range(min(rows - 1, len(values)))]
    if len(values) < rows:
        return np.array(first)
    return np.append(first, np.median(np.lib.stride_tricks.sliding_window_view(values, rows), axis=1))


def noise(values: np.ndarray) -> float:
    """Standard deviation of one row, from the median absolute deviation of first differences: a trend cancels."""
    steps = np.diff(values)
    return SD_OF_MAD * float(np.median(np.abs(steps - np.median(steps)))) / 2**0.5
