"""A learning rate beyond Adam's edge of stability."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence
from ..series import lasting

TABLE = "preconditioned_sharpness"
# The largest eigenvalue of Adam's preconditioned Hessian over (2 + 2 beta1) / ((1 - beta1) lr), beyond which Adam is
# unstable (Cohen et al. 2022, 2207.14484): full-batch training settles near 1, batches of few sentences below it, and
# single measurements scatter by decades. The median of the last half of the measurements lay above this in 30 of 48
# runs whose rate was too high, and in 6 of 130 healthy ones (results/alarm, training half; there measurements counted
# whether they had converged or not).
BEYOND = 12.0  # preconditioned sharpness (converged rows) over Adam's edge, (2 + 2 beta1) / ((1 - beta1) lr)
EDGE_ROWS = 8  # converged measurements of it


@detector(
    "beyond_the_edge",
    "learning rate beyond the edge of stability",
    reads={TABLE: f"probe {TABLE}"},
    least_rows=EDGE_ROWS,
    rule=(
        "Reads `preconditioned_sharpness.to_edge`: the median of the last half of its rows exceeds `BEYOND`. It "
        "needs `EDGE_ROWS` rows"
    ),
    remedy="Lower `lr`; if the rate lies beyond the edge at the start alone, add warm-up steps.",
    names_cause=True,
)
def beyond_the_edge(evidence: Evidence) -> Iterator[Event]:
    """Yield an event that begins at the first of three consecutive measurements above the limit, or else at the first
    measurement above it. Measurements that have not converged do not count."""
    grid = evidence.decisive(TABLE, "to_edge")
    if grid is None:
        return
    known = np.flatnonzero(np.isfinite(grid.values[:, 0]))
    values = grid.values[known, 0]
    middle = late_median(values)
    if not middle > BEYOND:
        return
    began = lasting(values[:, None] > BEYOND)
    row = int(known[began[0] if began else int(np.flatnonzero(values > BEYOND)[0])])
    yield Event(
        "beyond_the_edge",
        "learning rate beyond the edge of stability",
        **grid.first_seen(row),
        evidence=f"the preconditioned sharpness is {middle:.3g} times Adam's edge of stability at this learning rate "
        f"(median of the last half of {len(values)} measurements; the limit is {BEYOND:g}), from step "
        f"{grid.steps[row]} on",
        strength=middle / BEYOND,
        numbers={"to_edge": middle},
    )


def late_median(values: np.ndarray) -> float:
    """Return the median of the last half of the finite measurements; NaN with fewer than EDGE_ROWS of them."""
    values = values[np.isfinite(values)]
    return float(np.median(values[len(values) // 2 :])) if len(values) >= EDGE_ROWS else math.nan
