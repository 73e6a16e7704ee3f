"""A loss that ends above its lowest level by more than noise, without a divergence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence
from ..series import level, noise, until_broken
from .losses import RECORD, SPIKE_OF_START, last_stretch, loss_divergence, loss_spike, plateau

# The limit for the last level minus the lowest level, in robust standard deviations of one row. Both levels are
# medians of RISE_ROWS rows. The median of 20 rows has a standard deviation of .28, and the lowest of many medians is
# about .5 too low by chance. The limit was set on the training half of results/alarm, where the loss of no healthy run
# stood more than .51 above its lowest level. The floor is the floor of spikes.
RISE_ROWS = 20  # rows whose median is the level of a rise
RISE_SD = 1.5  # robust standard deviations of a row


@detector(
    "loss_rise",
    "rise of the loss",
    reads={"loss": RECORD},
    role="outcome",
    least_rows=2 * RISE_ROWS,
    rule=(
        "Reads `nll`, else `loss`: the level at the end is over the lowest level by more than `RISE_SD` robust "
        "standard deviations of a row, and by more than the floor of spikes at the start. It is left out if another "
        "detector of the loss reports the same"
    ),
    remedy="Lower `lr`, unless an earlier event names another cause.",
)
def loss_rise(evidence: Evidence) -> Iterator[Event]:
    """Yield a rise of the loss unless a divergence, a plateau or a spike that did not recover says the same."""
    grid = evidence.loss()
    if grid is None:
        return
    values, steps = until_broken(grid)
    if len(values) < 2 * RISE_ROWS:
        return
    levels, steps = level(values, RISE_ROWS)[RISE_ROWS - 1 :], steps[RISE_ROWS - 1 :]
    lowest, sd = float(levels.min()), noise(values)
    bound = max(RISE_SD * sd, SPIKE_OF_START * abs(float(np.median(values[:RISE_ROWS]))))
    over = float(levels[-1]) - lowest
    if not over > bound or _said(evidence):
        return
    at = last_stretch(levels > lowest + bound)
    score = f" ({over / sd:.3g} robust standard deviations of a row)" if sd else ""
    yield Event(
        "loss_rise",
        "rise of the loss",
        int(steps[at]),
        grid.phase,
        f"{grid.column} ends at {levels[-1]:.3g} (median of {RISE_ROWS} rows), {over:.3g} above its lowest level of "
        f"{lowest:.3g} at step {steps[int(levels.argmin())]}{score}",
        after=int(steps[at - 1]) if at else None,
        probe=grid.column,
        strength=over / bound,
        numbers={"last": float(levels[-1]), "lowest": lowest, "sd": sd},
    )


def _said(evidence: Evidence) -> bool:
    """True if another event says that the loss ends too high."""
    if any(next(found(evidence), None) is not None for found in (loss_divergence, plateau)):
        return True
    return any(spike.until is None for spike in loss_spike(evidence))
