"""Attention whose queries and keys get no gradient, since it has nothing to choose between: rank collapse."""

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
# attention that works has .01 to 1 there, attention whose tokens are alike 1e-7 and less (docs/diagnose.md).
NOTHING_TO_CHOOSE = 1e-4  # gradient of queries and keys over that of the rest of the attention
# Eight such phases passed within 510 updates (results/tiny/collapse.csv), one within 1,700:
# `probe --arch branchnorm --depth 8 --seed 2 --steps 2000` with train.lr=2e-3, data.sentences=8, data.held_out=8. Until
# then it is a note.
MAY_PASS = 2000  # updates, in which such a phase may pass
# Nats a token that a decoder gets out of its own source, beside another sentence's: of the 102 runs of
# results/tiny/source.csv 54 get less than .001 and 48 at least .43, so that any two numbers in between fit them.
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
        "`grad_norm.qk` beside the rest of the attention's gradient: < `NOTHING_TO_CHOOSE`; a note where it "
        "has passed at the end, began within `MAY_PASS` updates of it (the run is open then), or is in less "
        "than half of the layers"
    ),
    remedy=(
        "its keys are all alike (or a softmax is saturated: `attention` tells which): a lower rate, a longer "
        "warm-up, Pre-LN; probe `rank` shows the layer"
    ),
)
def rank_collapse(evidence: Evidence) -> Iterator[Event]:
    """Per stack and kind of attention; a note where it has passed, or may still pass, at the end of the run (then it is
    open whether it does), and where it is less than half of the layers."""
    keys, whole = evidence.grid("grad_norm", "qk"), evidence.grid("grad_norm", "value")
    if keys is None or whole is None:
        return
    rest = np.sqrt(np.maximum(whole.values**2 - keys.values**2, 0.0))
    share = times(np.where(keys.absent, np.nan, keys.values), np.where(whole.absent, np.nan, rest))
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
    after = f"; at the end so are {ends} of {len(keys.rows)}" if ends else "; it passed"
    if ends and not old:
        after += ", which may pass"
    if ends and source < NOTHING:
        after += "; with another sentence's source the held-out loss is the same"
    elif ends and source >= SOMETHING:
        after += f"; still its own source is worth {source:.2g} nats a token"
    yield Event(
        "rank_collapse",
        TITLE,
        step,
        keys.phase,
        f"queries and keys of {describe(keys.rows[place])} have {size} of the gradient of its values and output at "
        f"step {step}: attention has nothing to choose between{_why(evidence, keys, place, step)}{after}",
        severity="warning" if half and old else "note",
        after=keys.before(row),
        until=None if ends else until(np.any(low, axis=1, keepdims=True)[:, 0], row, keys.steps),
        place=keys.rows[place],
        places=max(int(kept.sum()), ends),
        probe="grad_norm.qk",
        strength=NOTHING_TO_CHOOSE / max(float(share[row, place]), 1e-12),
        numbers={"qk_over_rest": float(share[row, place]), "places_at_the_end": ends},
        open=f"whether the rank collapse of the {stack} passes" if half and not old and not source >= SOMETHING else "",
    )


def _why(evidence: Evidence, keys: Grid, place: int, step: int) -> str:
    """Read from the nearest row of the probe ``attention``, if recorded, if attention is uniform or saturated."""
    entropy, ceiling = evidence.grid("attention", "entropy"), evidence.grid("attention", "ceiling")
    if entropy is not None and ceiling is not None and keys.rows[place] in entropy.rows:
        at = int(np.abs(entropy.steps - step).argmin())
        share = times(entropy.values, ceiling.values)[at, entropy.rows.index(keys.rows[place])]
        if share > ALIKE:
            return f" (it is uniform: {share:.2g} of the entropy's ceiling), as where tokens have become alike"
        if share < SPENT:
            return f" (its softmax is saturated: {share:.2g} of the entropy's ceiling)"
    return ", as where tokens have become alike"
