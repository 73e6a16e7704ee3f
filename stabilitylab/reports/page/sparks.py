"""The loss of a run as a line so small that it stands in a row of a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..collection import Record
from ..pooling import thin
from ..run_grid import first_metric

WIDTH, HEIGHT, EDGE = 96, 22, 2  # pixels
POINTS = 12  # groups of points; at most five are kept of each
LOSSES = ("held_out_nll", "nll", "loss")


def spark(record: Record) -> dict[str, Any]:
    """Return the line as an SVG path, the place of the first number that was not finite, the last number, and a
    description; {} for a run without a loss."""
    steps, values = first_metric(record, *LOSSES)
    if not len(steps):
        return {}
    lost = np.flatnonzero(~np.isfinite(values))
    x, y = thin(steps.astype(float), values, POINTS)
    known = y[np.isfinite(y)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    across = EDGE + (x - x[0]) / max(float(x[-1] - x[0]), 1.0) * (WIDTH - 2 * EDGE)
    down = EDGE + (high - y) / (high - low or 1.0) * (HEIGHT - 2 * EDGE)
    words, pen = [], "M"
    for one, other in zip(across, down, strict=True):
        if np.isfinite(other):
            words.append(f"{pen}{one:.1f} {other:.1f}")
        pen = "L" if np.isfinite(other) else "M"
    mark = None
    if len(lost):
        at = lost[0]
        place = EDGE + (float(steps[at] - steps[0]) / max(float(steps[-1] - steps[0]), 1.0)) * (WIDTH - 2 * EDGE)
        before = values[:at][np.isfinite(values[:at])]
        height = EDGE + (high - float(before[-1])) / (high - low or 1.0) * (HEIGHT - 2 * EDGE) if len(before) else EDGE
        mark = {"x": round(place, 1), "y": round(height, 1), "step": int(steps[at])}
    last = f"{values[-1]:.4g}".replace("nan", "NaN")
    told = f"Loss from {values[0]:.4g} to {last}" + (f", not finite from step {mark['step']} on" if mark else "")
    return {"path": "".join(words), "lost": mark, "last": last, "told": told}
