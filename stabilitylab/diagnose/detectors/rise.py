"""A loss that ends above where it was: less than a divergence, more than noise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence
from ..series import level, noise, until_broken
from .losses import RECORD, SPIKE_OF_START, last_stretch, loss_divergence, loss_spike, plateau

# The level at the end over the lowest level, both medians of RISE_ROWS rows: so many robust standard deviations of one
# row. The median of 20 rows has .28 of them, and the lowest of many is some .5 too low by chance. Set on the training
# half of results/alarm, where no healthy run's loss stood more than .51 above; the floor is that of spikes.
RISE_ROWS, RISE_SD = 20, 1.5


@detector("loss_rise", "rise of the loss", reads={"loss": RECORD}, role="outcome", least_rows=2 * RISE_ROWS)
def loss_rise(evidence: Evidence) -> Iterator[Event]:
    """Where no spike that was not undone, divergence or plateau says the same."""
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
    score = f" ({over / sd:.3g} robust sd of a row)" if sd else ""
    yield Event(
        "loss_rise",
        "rise of the loss",
        int(steps[at]),
        grid.phase,
        f"{grid.column} ends at {levels[-1]:.3g}, the median of {RISE_ROWS} rows, {over:.3g} above its lowest level, "
        f"{lowest:.3g} at step {steps[int(levels.argmin())]}{score}",
        after=int(steps[at - 1]) if at else None,
        probe=grid.column,
        strength=over / bound,
        numbers={"last": float(levels[-1]), "lowest": lowest, "sd": sd},
    )


def _said(evidence: Evidence) -> bool:
    """Whether another event says that the loss ends too high."""
    if any(next(found(evidence), None) is not None for found in (loss_divergence, plateau)):
        return True
    return any(spike.until is None for spike in loss_spike(evidence))
