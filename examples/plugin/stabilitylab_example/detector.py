"""A detector, with its threshold beside its rule."""

import numpy as np

from stabilitylab.diagnose import Event, detector

LARGE = 2.0  # low, so that the example has something to find: behind a LayerNorm entries of 2 to 4 are usual


@detector("large_entry", "large entry", reads={"largest_entry": "probe largest_entry"})
def large_entry(evidence):
    grid = evidence.grid("largest_entry", "value")
    if grid is None or not (over := grid.values > LARGE).any():
        return
    row = int(np.flatnonzero(over.any(axis=1))[0])
    place = int(np.argmax(grid.values[row]))
    value = float(grid.values[row, place])
    yield Event(
        "large_entry",
        "large entry",
        int(grid.steps[row]),
        grid.phase,
        f"largest entry {value:.3g} at step {grid.steps[row]}, over {LARGE:g}",
        after=grid.before(row),
        place=grid.rows[place],
        probe=grid.name,
        strength=value / LARGE,
    )
