"""Rank collapse: queries and keys get no gradient, since attention is uniform over nearly identical keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence, Grid
from ..order import describe
from ..series import PERSIST, lasting, times, until

# The gradient norm of queries and keys beside that of the rest of the same attention, its values and output above all.
# Where all keys are alike the softmax's Jacobian meets equal numbers and gives exactly 0 (Noci et al. 2022, 2206.03126,
# on rank collapse at initialisation); what is left is rounding. Set when 54 runs of results/tiny had been seen:
# attention that works has .01 to 1 there, attention whose tokens are alike 1e-7 and less (docs/detectors.md).
NOTHING_TO_CHOOSE = 1e-4  # gradient of queries and keys over that of the rest of the attention
# Eight such phases passed within 510 updates (results/tiny/second/collapse.csv), one within 1,700:
# `probe --arch branchnorm --depth 8 --seed 2 --steps 2000` with train.lr=2e-3, data.sentences=8, data.held_out=8. Until
# then it is a note.
MAY_PASS = 2000  # updates, in which such a phase may pass
# Nats a token that a decoder gets out of its own source, beside another sentence's: of the 102 runs of
# results/tiny/second/source.csv 54 get less than .001 and 48 at least .43, so that any two numbers in between fit them.
NOTHING = 0.01  # nats a token: a source worth less (`source_worth`) is called worth nothing
SOMETHING = 0.1  # the same: from here on a collapse that may pass leaves a run healthy
ALIKE = 0.9  # of the ceiling of attention's entropy: uniform
SPENT = 0.1  # of that ceiling: saturated
TITLE = "rank collapse"
NEEDS = "probe grad_norm, where queries and keys can be told apart from the rest"


@detector(
    "rank_collapse",
    TITLE,
    reads={"grad_norm.qk": NEEDS},
    rule=(
        "Reads `grad_norm.qk` beside the rest of the attention's gradient: its share is below `NOTHING_TO_CHOOSE`. "
        "It is a note if it has passed at the end, if it began within `MAY_PASS` updates of the end (the run is "
        "open then), or if it is in less than half of the layers"
    ),
    remedy=(
        "Lower `lr`, add warm-up steps, or use Pre-LN; the probe `rank` shows the layer, and the probe `attention` "
        "tells identical keys from a saturated softmax."
    ),
)
def rank_collapse(evidence: Evidence) -> Iterator[Event]:
    """Yield at most one event for each stack and kind of attention. It is a note if the collapse has passed at the end
    of the run, if it may still pass (the run is open then), or if less than half of the layers have it."""
    keys, whole = evidence.grid("grad_norm", "qk"), evidence.grid("grad_norm", "value")
    if keys is None or whole is None:
        return
    rest = np.sqrt(np.maximum(whole.values**2 - keys.values**2, 0.0))
    closed = keys.values == 0  # no weight of the branch has a gradient, as in ProRes at t = 0
    if (norms := evidence.grid("grad_norm", "ln")) is not None and norms.rows == whole.rows:
        closed &= np.isclose(norms.values, whole.values, rtol=1e-6, atol=0)
    else:
        closed &= rest == 0
    share = times(keys.measured, np.where(whole.absent | closed, np.nan, rest))
    for stack, sublayer in dict.fromkeys((row.stack, row.sublayer) for row in keys.rows if row.layer > 0):
        own = np.array([(row.stack, row.sublayer) == (stack, sublayer) for row in keys.rows])
        if np.isfinite(share[:, own]).any():
            yield from _of(evidence, keys.select(own), share[:, own])


def _of(evidence: Evidence, keys: Grid, share: np.ndarray) -> Iterator[Event]:
    low = share < NOTHING_TO_CHOOSE  # False where there is no number
    if (found := lasting(low)) is None:
        return
    row, kept = found
    stack = keys.rows[0].stack
    place = int(np.flatnonzero(kept)[np.argmin(share[row, kept])])
    last = low[-PERSIST:].all(axis=0)
    ends = int(last.sum())
    size, step = f"{share[row, place]:.2g}", int(keys.steps[row])
    lasted = int(keys.steps[-1]) - step
    half, old = 2 * ends >= len(keys.rows), lasted >= MAY_PASS
    worth = evidence.metric("source_worth")
    source = math.nan if worth is None else float(worth.values[-1, 0])
    are = "is" if ends == 1 else "are"
    after = f"; at the end {ends} of {len(keys.rows)} layers {are} affected" if ends else "; it recovered"
    if ends and not old:
        after += ", and may recover"
    if ends and source < NOTHING:
        after += "; the decoder ignores its input (a wrong source does not change the validation loss)"
    elif ends and source >= SOMETHING:
        after += f"; the decoder still reads its source (a wrong one costs {source:.2g} nats a token)"
    yield Event(
        "rank_collapse",
        TITLE,
        **keys.first_seen(row),
        evidence=f"{_why(evidence, keys, place, step)}: the gradient of the queries and keys of "
        f"{describe(keys.rows[place])} is {size} of the gradient of its values and output at step {step}{after}",
        severity="warning" if half and old else "note",
        stands=half and old,
        until=None if ends else until(np.logical_or.reduce(low, axis=1), row, keys.steps),
        place=keys.rows[place],
        places=max(int(kept.sum()), ends),
        strength=NOTHING_TO_CHOOSE / max(float(share[row, place]), 1e-12),
        numbers={"qk_over_rest": float(share[row, place]), "places_at_the_end": ends},
        open=f"the rank collapse of the {stack} may pass" if half and not old and not source >= SOMETHING else "",
    )


def _why(evidence: Evidence, keys: Grid, place: int, step: int) -> str:
    """Say if attention is uniform or saturated, by the nearest row of the probe ``attention`` if it was recorded."""
    entropy, ceiling = evidence.grid("attention", "entropy"), evidence.grid("attention", "ceiling")
    if entropy is not None and ceiling is not None and keys.rows[place] in entropy.rows:
        at = int(np.abs(entropy.steps - step).argmin())
        share = times(entropy.values, ceiling.values)[at, entropy.rows.index(keys.rows[place])]
        if share > ALIKE:
            return f"attention is uniform ({share:.2g} of the largest possible entropy), as if the keys were identical"
        if share < SPENT:
            return f"attention is saturated ({share:.2g} of the largest possible entropy)"
    return "attention does not choose, as if the keys were identical"
