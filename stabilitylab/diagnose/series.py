"""Statistics of a series of rows: its level and noise, the largest earlier number, states that last.

"Rows" are recorded steps of the series or table at hand: with a sparse cadence they lie further apart than steps.
"""

from __future__ import annotations

import numpy as np

from .evidence import Grid

# A jump is measured against the largest number of the last PAST rows; there must be at least LEAST_PAST of them. A
# linear warm-up that starts near 0 multiplies its rate by up to 100 between its first rows, and by at most 1.25 from
# the fifth row on.
PAST = 50  # rows that a jump is measured against
LEAST_PAST = 4  # rows before a jump can be told: earlier ones have nothing to be compared with
# A state of a layer (vanishing, dead, collapsed) must hold in this many consecutive rows; a single row may be noise.
PERSIST = 3  # rows in a row in which a layer's state must hold
LEVEL_ROWS = 10  # rows whose median is the level
JUDGED_ROWS = 20  # rows of the loss after an event, from which on its consequence is judged
_SD_OF_MAD = 1.4826  # of a normal distribution


def level(values: np.ndarray, rows: int = LEVEL_ROWS) -> np.ndarray:
    """Return the running median: of each row and the ``rows`` - 1 rows before it."""
    first = [np.median(values[: at + 1]) for at in range(min(rows - 1, len(values)))]
    if len(values) < rows:
        return np.array(first)
    return np.append(first, np.median(np.lib.stride_tricks.sliding_window_view(values, rows), axis=1))


def until_broken(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, steps) before the first number that is not finite, which is an event of its own."""
    values = grid.values[:, 0]
    broken = np.flatnonzero(~np.isfinite(values))
    end = int(broken[0]) if len(broken) else len(values)
    return values[:end], grid.steps[:end]


def noise(values: np.ndarray) -> float:
    """Return the standard deviation of one row, from the median absolute deviation of first differences. A constant
    trend cancels."""
    steps = np.diff(values)
    return _SD_OF_MAD * float(np.median(np.abs(steps - np.median(steps)))) / 2**0.5


def went_on_learning(loss: Grid | None, step: int) -> bool:
    """True if the level of the loss reached a new minimum after ``step``. The level is a running median.

    The new minimum is below every level up to ``step``. It is also below the first level whose rows are all after
    ``step``, since a running median lags behind a loss that falls.
    """
    if loss is None:
        return False
    values = loss.values[:, 0]
    finite = np.isfinite(values)
    levels, until = level(values[finite]), int((loss.steps[finite] <= step).sum())
    first = until + LEVEL_ROWS - 1
    if not until or first + 1 >= len(levels):
        return False
    return float(levels[first + 1 :].min()) < min(float(levels[:until].min()), float(levels[first]))


def rows_after(loss: Grid, step: int) -> int:
    """Return the number of rows with a finite loss after a step."""
    return int((np.isfinite(loss.values[:, 0]) & (loss.steps > step)).sum())


def at_the_end(values: np.ndarray, row: int) -> float:
    """Return the median of the last LEVEL_ROWS finite values from ``row`` on; NaN with fewer than PERSIST of them."""
    later = values[row:]
    later = later[np.isfinite(later)][-LEVEL_ROWS:]
    return float(np.median(later)) if len(later) >= PERSIST else float("nan")


def past_largest(values: np.ndarray, window: int | None = PAST, least: int = LEAST_PAST) -> np.ndarray:
    """Return the largest finite number of the ``window`` rows before each row (None: of all earlier rows). It is NaN
    with fewer than ``least`` earlier rows.

    values (S, R) -> (S, R).
    """
    usual = np.where(np.isfinite(values), values, np.nan)
    largest = np.full(values.shape, np.nan)
    if window is None:
        running = np.fmax.accumulate(usual, axis=0)
        largest[least:] = running[least - 1 : -1]
        return largest
    for row in range(least, len(values)):
        largest[row] = np.fmax.reduce(usual[max(0, row - window) : row], axis=0)
    return largest


def times(values: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Return values / base where the base is positive and finite, NaN elsewhere."""
    return np.divide(values, base, out=np.full(values.shape, np.nan), where=(base > 0) & np.isfinite(base))


def felt_growth(values: np.ndarray, share: float) -> np.ndarray:
    """Return values over the largest of the rows before. It is NaN for a value below ``share`` of the largest of its
    row: the model does not feel such a place."""
    felt = values >= share * np.fmax.reduce(values, axis=1, initial=0.0)[:, None]
    return np.where(felt, times(values, past_largest(values)), np.nan)


def first_above(ratio: np.ndarray, threshold: float) -> tuple[int, int, int] | None:
    """Find the first row in which a finite ratio is above the threshold: (row, place of the largest finite ratio,
    number of places)."""
    above = np.isfinite(ratio) & (ratio > threshold)
    if not above.any():
        return None
    row = int(np.flatnonzero(above.any(1))[0])
    place = int(np.nanargmax(np.where(above[row], ratio[row], np.nan)))
    return row, place, int(above[row].sum())


def usual_before(grid: Grid, row: int, place: int) -> tuple[float, str]:
    """Return the median of up to PAST rows of a place before ``row``, and the number of ``row`` beside it in words."""
    first = max(0, row - PAST)
    values = grid.values[first:row, place]
    median, rows = float(np.median(values[np.isfinite(values)])), f"rows {grid.steps[first]}-{grid.steps[row - 1]}"
    if not median:
        return median, f"after a median of 0 in {rows}"
    return median, f"{float(grid.values[row, place]) / median:.3g} times the median of {rows}"


def lasting(holds: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Return the first row from which ``holds`` (S, R) is True in PERSIST consecutive rows, and the places where it is.
    With fewer than PERSIST rows it must be True in all of them."""
    need = min(PERSIST, len(holds))
    for row in range(len(holds) - need + 1 if need else 0):
        kept = np.logical_and.reduce(holds[row : row + need], axis=0)
        if kept.any():
            return row, kept
    return None


def until(holds: np.ndarray, row: int, steps: np.ndarray) -> int | None:
    """Return the first step from ``row`` on at which ``holds`` is False; None if it holds to the end."""
    over = np.flatnonzero(~holds[row:])
    return int(steps[row + over[0]]) if len(over) else None
