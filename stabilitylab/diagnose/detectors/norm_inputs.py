"""What enters a norm, and how it grows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence
from ..order import describe
from ..series import first_above, past_largest, times, went_on_learning

# What enters a norm divides the gradient through it (||J|| ~ sqrt(d) / ||x||). Suddenly: against its own past;
# slowly: against the run's own start, since DeepNorm's alpha sqrt(d) is there by construction. Pre-LN's stream grows
# by a few times while it learns well, hence the order of magnitude. Slow growth after which the loss still came to a
# new minimum is a note. (This rule was added after a look at GPT-2 with its usual initialisation: the input of its
# last norm starts at a thirtieth of sqrt(d) and grows tenfold within 13 steps. The minimum is one of the level: of the
# loss's rows one is low by chance, and healthy Pre-LN models of results/alarm, training half, were accused.)
LN_JUMP, LN_GROWTH = 3.0, 10.0


@detector("ln_growth", "growth of norm inputs", reads={"ln_input": "probe ln_input"})
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
    harmless = ratio is slow and went_on_learning(evidence.loss(), int(grid.steps[row]))
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
