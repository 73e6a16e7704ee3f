"""The growth of norm inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence
from ..order import describe
from ..series import at_the_end, first_above, past_largest, times

# The norm input divides the gradient through the norm (||J|| ~ sqrt(d) / ||x||). Sudden growth is measured against the
# input's own past. Slow growth is measured against the start of the run, since DeepNorm's alpha sqrt(d) is there by
# construction. The limit of slow growth is an order of magnitude, since the stream of a Pre-LN model that learns well
# grows by a few times. Slow growth is judged by the loss alone. (An example is GPT-2: with its usual initialisation the
# input of the last norm starts at sqrt(d) / 30 and grows tenfold within 13 steps.)
LN_JUMP = 3.0  # norm input over the largest before
LN_GROWTH = 10.0  # norm input over the run's start


@detector(
    "ln_growth",
    "growth of norm inputs",
    reads={"ln_input": "probe ln_input"},
    rule=(
        "Reads `ln_input.value`. Sudden: more than `LN_JUMP` times the rows before. Slow: more than `LN_GROWTH` "
        "times the start of the run; slow growth never counts as a condition that stands, since norm inputs of "
        "healthy models grow"
    ),
    remedy="Look at the named layer: its branch is too large. Initialise it smaller, or lower `lr`.",
)
def ln_growth(evidence: Evidence) -> Iterator[Event]:
    """Compare norm inputs with their own past (sudden growth) and with the start of the run (slow growth)."""
    grid = evidence.grid("ln_input", "value")
    if grid is None:
        return
    values = grid.measured
    sudden = times(values, past_largest(values))
    slow = times(values, np.where(np.isfinite(values[:1]), values[:1], np.nan))
    candidates = [
        (found, ratio, threshold, text)
        for ratio, threshold, text in (
            (sudden, LN_JUMP, "times the largest of the rows before"),
            (slow, LN_GROWTH, f"times its size at step {grid.steps[0]}"),
        )
        if (found := first_above(ratio, threshold)) is not None
    ]
    if not candidates:
        return
    (row, _, places), ratio, threshold, text = min(candidates, key=lambda candidate: candidate[0][0])
    # Norms higher up see the same growth: it enters where it is first above on the way up.
    place = int(np.flatnonzero(np.nan_to_num(ratio[row]) > threshold)[0])
    size, factor = float(values[row, place]), float(ratio[row, place])
    yield Event(
        "ln_growth",
        "growth of norm inputs",
        **grid.first_seen(row),
        evidence=f"the input of the norm at {describe(grid.rows[place])} is {size:.3g} at step {grid.steps[row]}, "
        f"{factor:.3g} {text}",
        place=grid.rows[place],
        places=places,
        strength=float(np.nanmax(ratio[row])) / threshold,
        stands=ratio is sudden and at_the_end(values[:, place], row) > LN_JUMP * size / factor,
        numbers={"value": size, "factor": factor},
    )
