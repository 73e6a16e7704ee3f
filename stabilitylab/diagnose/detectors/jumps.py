"""What jumps against its own past: learning rate, updates, weights, and the inputs of norms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence, Grid
from ..order import describe
from ..series import level
from ..thresholds import LEAST_PAST, LN_GROWTH, LN_JUMP, LR_JUMP, PAST, PERSIST, UPDATE_JUMP, UPDATE_SHARE, WEIGHT_JUMP


def past_largest(values: np.ndarray, window: int | None = PAST, least: int = LEAST_PAST) -> np.ndarray:
    """The largest finite number of the ``window`` rows before each row (None: of all), NaN with fewer than ``least``.

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
    """values / base where the base is positive and finite, NaN elsewhere."""
    return np.divide(values, base, out=np.full(values.shape, np.nan), where=(base > 0) & np.isfinite(base))


def first_above(ratio: np.ndarray, threshold: float, steps: np.ndarray) -> tuple[int, int, int] | None:
    """(row, place with the largest ratio there, number of places) of the first row in which a finite ratio is above."""
    above = np.isfinite(ratio) & (ratio > threshold)
    if not above.any():
        return None
    row = int(np.flatnonzero(above.any(1))[0])
    place = int(np.nanargmax(np.where(above[row], ratio[row], np.nan)))
    return row, place, int(above[row].sum())


def usual_before(grid: Grid, row: int, place: int) -> tuple[float, str]:
    """The median of a place's rows before ``row``, and which those are."""
    first = max(0, row - PAST)
    values = grid.values[first:row, place]
    return float(np.median(values[np.isfinite(values)])), f"rows {grid.steps[first]}-{grid.steps[row - 1]}"


@detector("lr_jump", "learning-rate jump", lr="w.step(loss=loss, lr=rate)")
def lr_jump(evidence: Evidence) -> Iterator[Event]:
    grid = evidence.metric("lr", "learning_rate")
    if grid is None:
        return
    ratio = times(grid.values, past_largest(grid.values, window=None))
    found = first_above(ratio, LR_JUMP, grid.steps)
    if found is None:
        return
    row, _, _ = found
    size, factor = float(grid.values[row, 0]), float(ratio[row, 0])
    yield Event(
        "lr_jump",
        "learning-rate jump",
        int(grid.steps[row]),
        grid.phase,
        f"learning rate {size:.3g} at step {grid.steps[row]}, {factor:.3g} times its maximum before",
        after=grid.before(row),
        probe=grid.column,
        strength=factor / LR_JUMP,
        numbers={"rate": size, "times_maximum_before": factor},
    )


@detector(
    "update_jump",
    "update jump",
    update_ratio="optimizer=optimizer, or probe update_ratio",
    model_update="reference=, or probe model_update",
)
def update_jump(evidence: Evidence) -> Iterator[Event]:
    """The optimizer's update (rms over entries, layer by layer), or what one update did to the output, ||dF||."""
    grid = evidence.grid("update_ratio", "rms")
    if grid is not None:
        values = np.where(grid.absent, np.nan, grid.values)
        felt = values >= UPDATE_SHARE * np.fmax.reduce(values, axis=1, initial=0.0)[:, None]
        ratio = np.where(felt, times(values, past_largest(values)), np.nan)
        yield from _update(grid, ratio, "update rms")
    grid = evidence.grid("model_update", "one_update")
    if grid is not None:
        # row t compares theta_t with theta_{t-1}: what the updates before it did
        yield from _update(grid, times(grid.values, past_largest(grid.values)), "||dF|| since the step before")


def _update(grid: Grid, ratio: np.ndarray, what: str) -> Iterator[Event]:
    found = first_above(ratio, UPDATE_JUMP, grid.steps)
    if found is None:
        return
    row, place, places = found
    step, size, factor = int(grid.steps[row]), float(grid.values[row, place]), float(ratio[row, place])
    median, rows = usual_before(grid, row, place)
    yield Event(
        "update_jump",
        "update jump",
        step,
        grid.phase,
        f"{what} {size:.3g} at step {step} ({describe(grid.rows[place])}), {size / median:.3g} times the median of "
        f"{rows}",
        after=grid.before(row),
        place=grid.rows[place],
        places=places,
        probe=grid.name,
        strength=factor / UPDATE_JUMP,
        numbers={"value": size, "times_median_before": size / median, "times_largest_before": factor},
    )


@detector("weight_jump", "weights changed other than by an update", update_ratio="optimizer=optimizer")
def weight_jump(evidence: Evidence) -> Iterator[Event]:
    """rms(theta) = rms / value of ``update_ratio``, between neighbouring rows: scaled, zeroed or loaded in between.

    The updates in between explain a change up to their own size; new weights of the old size are not seen.
    """
    ratio, rms = evidence.grid("update_ratio", "value"), evidence.grid("update_ratio", "rms")
    if ratio is None or rms is None:
        return
    known = np.isfinite(rms.values) & (rms.values > 0) & (ratio.values > 0)
    # 0 where the ratio is inf: weights that are exactly 0
    size = np.divide(rms.values, ratio.values, out=np.full(rms.values.shape, np.nan), where=known)
    factor = np.full(size.shape, np.nan)
    change = times(size[1:], size[:-1])
    factor[1:] = np.maximum(change, 1 / change)
    gap = np.diff(ratio.steps)[:, None]  # updates from one row to the next, each about as large as those recorded
    explained = gap * np.fmax(rms.values[:-1], np.where(gap > 1, rms.values[1:], 0))
    factor[1:][np.abs(np.diff(size, axis=0)) <= 1.01 * explained] = np.nan
    before = np.cumsum(size > 0, axis=0) - (size > 0)
    factor[before < LEAST_PAST] = np.nan  # weights that start from 0 grow by any factor
    if not (far := factor > WEIGHT_JUMP).any():
        return
    row = int(np.flatnonzero(far.any(1))[0])
    places = np.flatnonzero(far[row])
    place = int(places[np.argmax(factor[row, places])])
    now, then = float(size[row, place]), float(size[row - 1, place])
    how = f"{now / then:.3g} times" if now else "exactly 0, from"
    yield Event(
        "weight_jump",
        "weights changed other than by an update",
        int(ratio.steps[row]),
        "between",
        f"the weights of {describe(ratio.rows[place])} are {how} those of step {ratio.steps[row - 1]} at step "
        f"{ratio.steps[row]} (rms {then:.3g} to {now:.3g}), where the update at step {ratio.steps[row - 1]} had rms "
        f"{rms.values[row - 1, place]:.3g}",
        after=ratio.before(row),
        place=ratio.rows[place],
        places=len(places),
        probe="update_ratio",
        strength=float(min(factor[row, place], 1e9)) / WEIGHT_JUMP,
        numbers={"rms_before": then, "rms": now},
    )


def went_on_learning(evidence: Evidence, step: int) -> bool:
    """Whether the level of the loss, a median of rows, came below every row up to ``step``."""
    grid = evidence.loss()
    if grid is None:
        return False
    values = grid.values[:, 0]
    finite = np.isfinite(values)
    values, steps = values[finite], grid.steps[finite]
    before, after = values[steps <= step], level(values)[steps > step]
    return len(before) > 0 and len(after) > PERSIST and float(after.min()) < float(before.min())


@detector("ln_growth", "growth of norm inputs", ln_input="probe ln_input")
def ln_growth(evidence: Evidence) -> Iterator[Event]:
    """What enters a norm, against its own past (sudden) and against the run's own start (slow)."""
    grid = evidence.grid("ln_input", "value")
    if grid is None:
        return
    values = np.where(grid.absent, np.nan, grid.values)
    sudden = times(values, past_largest(values))
    slow = times(values, np.where(np.isfinite(values[:1]), values[:1], np.nan))
    candidates = [
        (found, ratio, threshold, text)
        for ratio, threshold, text in (
            (sudden, LN_JUMP, "times the largest of the rows before"),
            (slow, LN_GROWTH, f"times that at step {grid.steps[0]}"),
        )
        if (found := first_above(ratio, threshold, grid.steps)) is not None
    ]
    if not candidates:
        return
    (row, _, places), ratio, threshold, text = min(candidates, key=lambda candidate: candidate[0][0])
    # Norms higher up see the same growth: it enters where it is first above on the way up.
    place = int(np.flatnonzero(np.nan_to_num(ratio[row]) > threshold)[0])
    harmless = ratio is slow and went_on_learning(evidence, int(grid.steps[row]))
    size, factor = float(values[row, place]), float(ratio[row, place])
    yield Event(
        "ln_growth",
        "growth of norm inputs",
        int(grid.steps[row]),
        grid.phase,
        f"norm input {size:.3g} at step {grid.steps[row]} ({describe(grid.rows[place])}), {factor:.3g} {text}",
        severity="note" if harmless else "warning",
        after=grid.before(row),
        place=grid.rows[place],
        places=places,
        probe=grid.name,
        strength=float(np.nanmax(ratio[row])) / threshold,
        numbers={"value": size, "factor": factor},
    )
