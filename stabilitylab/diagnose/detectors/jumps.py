"""Jumps of the learning rate, of updates and of weights against their own past."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..changed import ALWAYS, SETTING, change_events
from ..events import LEDGER, Event, detector
from ..evidence import Evidence, Grid
from ..order import describe
from ..series import LEAST_PAST, at_the_end, felt_growth, first_above, past_largest, times, usual_before

# The learning rate against its maximum so far: schedules and restarts come back to it, or grow by per cents.
LR_JUMP = 3.0  # learning rate over its maximum so far
# The size of an update, or of ||dF||, against its own past. Adam's answer to a sudden gradient is at most
# (1 - b1) / sqrt(1 - b2), 3.2 times the rate for (.9, .999), where 0.1 to 0.3 is usual; and noise stays within 2.
UPDATE_JUMP = 5.0  # update over the largest before
# An update counts only where it is at least this share of the model's largest: growth of 1e-12 to 1e-9 moves nothing.
UPDATE_SHARE = 0.1  # of the model's largest update
# The size of a layer's weights between neighbouring rows: no optimizer at a working rate multiplies it by ten.
WEIGHT_JUMP = 10.0  # size of a layer's weights between neighbouring rows


@detector(
    "lr_jump",
    "learning-rate jump",
    reads={"lr": "w.step(loss=loss, lr=rate)", LEDGER: ALWAYS},
    role="setting",
    explains=("update_jump",),
    least_rows=LEAST_PAST + 1,
    rule=(
        "Reads the metric `lr` or `learning_rate`: more than `LR_JUMP` times its maximum so far. Without the "
        "metric, and for each parameter group, it reads the rates of the ledger from a 1.5-fold rise on; a rise "
        "below `LR_JUMP` never counts as a condition that stands"
    ),
    remedy="Check the schedule, and what a resume restored: set `lr` back to its former value.",
    names_cause=True,
    in_steps=True,
)
def lr_jump(evidence: Evidence) -> Iterator[Event]:
    """Yield jumps of the learning rate. The condition stands unless the rate came back to its maximum before the
    jump."""
    seen = set()
    for event in _of_metric(evidence):
        seen.add(event.step)
        yield event
    for event in change_events(evidence, "lr_jump", "learning-rate jump", SETTING, ("rate",)):
        if event.step not in seen:
            factor = event.numbers.get("factor", LR_JUMP)
            yield replace(event, strength=factor / LR_JUMP, stands=event.stands and factor >= LR_JUMP)


def _of_metric(evidence: Evidence) -> Iterator[Event]:
    grid = evidence.metric("lr", "learning_rate")
    if grid is None:
        return
    ratio = times(grid.values, past_largest(grid.values, window=None))
    found = first_above(ratio, LR_JUMP)
    if found is None:
        return
    row, _, _ = found
    size, factor = float(grid.values[row, 0]), float(ratio[row, 0])
    back = np.flatnonzero(grid.values[row + 1 :, 0] <= size / factor)
    yield Event(
        "lr_jump",
        "learning-rate jump",
        **grid.first_seen(row),
        evidence=f"the learning rate rose to {size:.3g} at step {grid.steps[row]}, {factor:.3g} times its maximum "
        "before",
        until=int(grid.steps[row + 1 + int(back[0])]) if len(back) else None,
        strength=factor / LR_JUMP,
        numbers={"rate": size, "times_maximum_before": factor},
        stands=not len(back),
        advice=f"Set `lr` back to {size / factor:.3g}, its largest value before step {grid.steps[row]}: check the "
        "schedule, and what a resume restored.",
    )


@detector(
    "update_jump",
    "update jump",
    reads={
        "update_ratio": "optimizer=optimizer, or probe update_ratio",
        "model_update": "reference=, or probe model_update",
    },
    least_rows=LEAST_PAST + 1,
    rule=(
        "Reads `update_ratio.rms` by sub-layer and `model_update.one_update`: more than `UPDATE_JUMP` times the "
        "largest of the rows before, and at least `UPDATE_SHARE` of the largest of the model"
    ),
    remedy="Lower `lr`, add warm-up steps or clip the gradients; raise Adam's `eps` if second moments were tiny.",
)
def update_jump(evidence: Evidence) -> Iterator[Event]:
    """Compare with its own past: the optimizer's update (rms over entries, layer by layer), and the change of the
    output by one update, ||dF||."""
    grid = evidence.grid("update_ratio", "rms")
    if grid is not None:
        yield from _update(grid, felt_growth(grid.measured, UPDATE_SHARE), "the rms of the update")
    grid = evidence.grid("model_update", "one_update")
    if grid is not None:
        # row t compares theta_t with theta_{t-1}: what the updates before it did
        yield from _update(grid, times(grid.values, past_largest(grid.values)), "||dF|| of one update")


def _update(grid: Grid, ratio: np.ndarray, what: str) -> Iterator[Event]:
    found = first_above(ratio, UPDATE_JUMP)
    if found is None:
        return
    row, place, places = found
    size, factor = float(grid.values[row, place]), float(ratio[row, place])
    median, beside = usual_before(grid, row, place)
    yield Event(
        "update_jump",
        "update jump",
        **grid.first_seen(row),
        evidence=f"{what} of {describe(grid.rows[place])} is {size:.3g} at step {grid.steps[row]}, {beside}",
        place=grid.rows[place],
        places=places,
        strength=factor / UPDATE_JUMP,
        stands=at_the_end(grid.values[:, place], row) > UPDATE_JUMP * size / factor,
        numbers={
            "value": size,
            **({"times_median_before": size / median} if median else {}),
            "times_largest_before": factor,
        },
    )


@detector(
    "weight_jump",
    "weights changed other than by an update",
    reads={"update_ratio": "optimizer=optimizer"},
    role="setting",
    explains=("update_jump", "ln_growth"),
    least_rows=LEAST_PAST + 1,
    rule=(
        "Reads the rms of the weights (`update_ratio.rms / value`): it grows or shrinks by more than a factor of "
        "`WEIGHT_JUMP` between neighbouring rows"
    ),
    remedy="Find what wrote into the weights: a checkpoint (`load_state_dict`), an initialisation, surgery.",
    names_cause=True,
)
def weight_jump(evidence: Evidence) -> Iterator[Event]:
    """Compare rms(theta) = rms / value of ``update_ratio`` between neighbouring rows, to find weights that were scaled,
    zeroed or loaded in between.

    The updates in between explain a change up to their own size. New weights of the old size are not found.
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
    last = at_the_end(size[:, place], row)
    how = f"{now / then:.3g} times" if now else "exactly 0, after"
    yield Event(
        "weight_jump",
        "weights changed other than by an update",
        int(ratio.steps[row]),
        "between",
        f"the weights of {describe(ratio.rows[place])} at step {ratio.steps[row]} are {how} those of step "
        f"{ratio.steps[row - 1]} (rms {then:.3g} to {now:.3g}); the update at step {ratio.steps[row - 1]} had an "
        f"rms of {rms.values[row - 1, place]:.3g} only",
        after=ratio.before(row),
        place=ratio.rows[place],
        places=len(places),
        probe="update_ratio",
        strength=float(min(factor[row, place], 1e9)) / WEIGHT_JUMP,
        stands=last > WEIGHT_JUMP * then or last < then / WEIGHT_JUMP,
        numbers={"rms_before": then, "rms": now},
    )
