"""The first rows of a loss: where it began, and whether it exploded before there was a past to compare it with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...verdict import TOO_EARLY
from ..events import Event, detector
from ..evidence import Evidence, Grid
from ..series import level, noise, until_broken

# An explosion in the rows that a loss spike cannot judge, since it takes LEAST_ROWS of them to know level and noise: up
# to this row the loss is over the median of the rows before it by so much of the loss at the start. None of the 130
# healthy runs of results/alarm, training half, and none of the 204 of the other half is beyond it (bounds.csv there).
FIRST_ROWS = 10  # rows in which a loss may explode before it has a past
EXPLODED_LOSS = 0.25  # of the first loss: a rise over the rows before
# The guard against a loss that jumps up and down as a matter of course: so many robust standard deviations, those of a
# loss spike, of the rows after the peak.
GUARD_SD = 7.0  # robust standard deviations of the rows after the peak, which that rise must exceed as well
# The loss is back where it began where a median of so many rows is at most this share above it, that of a plateau.
BACK_ROWS = 5  # rows whose median says whether the loss came back ...
BACK = 0.02  # ... to at most this share above where it began
# Where row 0 is within this share of ln(classes), the loss is the cross-entropy of these classes in nats.
UNIFORM_SHARE = 0.10  # of ln(classes): a first loss so near to it is a cross-entropy over these classes


class Explosion(NamedTuple):
    """The rows at which a loss began to explode and was largest; the loss before, a median; and the bound on a rise."""

    at: int
    peak: int
    before: float
    bound: float


def explosion(values: np.ndarray) -> Explosion | None:
    """Find the first of the first ten rows that is far above the median of the rows before it; None without one."""
    if len(values) < 2 or not values[0]:
        return None
    usual = level(values)[:-1]
    rise = values[1:] - usual
    for at in np.flatnonzero(rise[:FIRST_ROWS] > EXPLODED_LOSS * abs(values[0])).tolist():
        before = float(usual[at])
        back = np.flatnonzero(values[at + 1 :] <= before + rise[at] / 2)
        end = at + 1 + int(back[0]) if len(back) else len(values)
        peak = at + 1 + int(values[at + 1 : end].argmax())
        later = values[peak + 1 :]
        sd = noise(later) if len(later) >= BACK_ROWS else 0.0
        bound = max(EXPLODED_LOSS * abs(float(values[0])), GUARD_SD * sd)
        if values[peak] - before > bound:
            return Explosion(at + 1, peak, before, bound)
    return None


def start(values: np.ndarray, rows: int = 5) -> float:
    """Return the loss at the start: the median of the first rows, or the loss before an explosion in them."""
    found = explosion(values)
    return float(np.median(values[:rows])) if found is None else found.before


def uniform(evidence: Evidence, grid: Grid) -> float | None:
    """Return ln(classes), the loss of a uniform guess; None if the number of classes is not known, or if the loss is
    not their cross-entropy in nats."""
    classes = evidence.classes
    if classes is None:
        return None
    guess = math.log(classes)
    first = float(grid.values[0, 0])
    return guess if grid.column == "nll" or abs(first - guess) <= UNIFORM_SHARE * guess else None


@detector(
    "early_explosion",
    "explosion of the loss at the start",
    reads={"loss": "w.step(loss=loss)"},
    least_rows=2,
    rule=(
        "Reads `nll`, else `loss`, in its first `FIRST_ROWS` rows, which have too little past for a loss spike. The "
        "loss rises by more than `EXPLODED_LOSS` of the first loss over the median of the rows before, and by more "
        "than `GUARD_SD` robust standard deviations. It is a failure if the loss does not come back to where it "
        "began, else a warning"
    ),
    remedy="Lower `lr`, add warm-up steps, or use a smaller initialisation.",
)
def early_explosion(evidence: Evidence) -> Iterator[Event]:
    """Yield a failure if the loss does not come back to where it began. Yield a warning if it does, or if the run
    learns by its held-out loss."""
    grid = evidence.loss()
    if grid is None:
        return
    values, steps = until_broken(grid)
    found = explosion(values)
    if found is None:
        return
    last = float(np.median((values[found.peak + 1 :] if len(values) > found.peak + 1 else values)[-BACK_ROWS:]))
    back = last <= found.before + BACK * abs(found.before)
    learns = evidence.verdict is not None and evidence.verdict.state in ("trained", "learning")
    before, peak = f"{found.before:.3g}", f"{values[found.peak]:.3g}"
    ends = f"{last:.3g} at step {steps[-1]}"
    over = np.flatnonzero(level(values, BACK_ROWS)[found.peak :] <= found.before) if back else []
    text = (
        f"{grid.column} rises from {before} to {peak} at step {steps[found.peak]}, by "
        f"{(values[found.peak] - found.before) / abs(float(values[0])):.0%} of the first loss; "
        + (f"it comes back to {ends}" if back else f"it does not come back: {ends}")
    )
    yield Event(
        "early_explosion",
        "explosion of the loss at the start",
        **grid.first_seen(found.at),
        evidence=text,
        severity="warning" if back or learns else "failure",
        until=int(steps[found.peak + int(over[0])]) if len(over) else None,
        strength=float(values[found.peak] - found.before) / found.bound,
        numbers={"before": found.before, "peak": float(values[found.peak]), "last": last},
        stands=not back,
        judged_from=0 if back or evidence.status.state != "running" else TOO_EARLY,
    )
