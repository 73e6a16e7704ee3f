"""Attention that collapses onto one key, and logits that grow without bound."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence, Grid
from ..order import describe
from ..series import lasting, times, until

# Attention entropy as a share of its ceiling, log of the number of keys, and of where it started (Zhai et al. 2023);
# the largest attention logit (QK-Clip's bound in Kimi K2).
ENTROPY_SHARE = 0.05  # of the ceiling: each query looks at one key
ENTROPY_FALL = 0.2  # of the share at the start
MAX_LOGIT = 100.0  # attention logit
# Heads that look at one key are usual late in a healthy run. They cost it something where most of them did so early:
# then they chose before there was anything to choose by. Both bounds come from the choosing half of the second corpus.
SPENT_MODULES = 0.5  # of the attention modules
SPENT_ROWS = 0.6  # of the recorded rows


@detector(
    "attention_collapse",
    "attention entropy collapse",
    reads={"attention": "probe attention"},
    rule=(
        "Reads `attention.entropy` and its `ceiling`: the entropy is below `ENTROPY_SHARE` of the ceiling and below "
        "`ENTROPY_FALL` of its start. Large attention logits: `attention.max_logit` exceeds `MAX_LOGIT`. Both are "
        "notes if the loss goes on falling, unless the entropy is below `ENTROPY_SHARE` in `SPENT_MODULES` of the "
        "modules, for `SPENT_ROWS` of the rows and in the last row"
    ),
    remedy="Use QK-norm, or lower `lr`; against large logits, clip q and k (QK-clip).",
)
def attention_collapse(evidence: Evidence) -> Iterator[Event]:
    entropy, ceiling = evidence.grid("attention", "entropy"), evidence.grid("attention", "ceiling")
    if entropy is not None and ceiling is not None:
        yield from _collapsed(entropy, times(entropy.measured, ceiling.values))
    logit = evidence.grid("attention", "max_logit")
    if logit is not None:
        yield from _large(logit)


def _collapsed(entropy: Grid, share: np.ndarray) -> Iterator[Event]:
    """Yield the event of entropies that are ``share`` (S, R) of their ceiling."""
    spent = share < ENTROPY_SHARE
    half = spent.sum(1) >= SPENT_MODULES * np.maximum(np.isfinite(share).sum(1), 1)
    most = bool(half[-1]) and float(half.mean()) >= SPENT_ROWS
    low = spent & (share < ENTROPY_FALL * share[:1])
    found = lasting(low)
    if found is None and most:  # spent from the first row on: there was nothing to fall
        low = spent
        found = lasting(low)
    if found is None:
        return
    row, kept = found
    place = int(np.flatnonzero(kept)[0])
    ends, count = int(spent[-1].sum()), int(np.isfinite(share[-1]).sum())
    told = (
        f"; {ends} of {count} attention modules are below {ENTROPY_SHARE:g} at the end, and half or more are below it "
        f"in {half.mean():.0%} of the rows"
    )
    yield Event(
        "attention_collapse",
        "attention entropy collapse",
        **entropy.first_seen(row),
        evidence=f"the attention entropy of {describe(entropy.rows[place])} is {share[row, place]:.2g} of its largest "
        f"possible value at step {entropy.steps[row]}; at the start it was {share[0, place]:.2g}{told if most else ''}",
        until=(end := until(low[:, place], row, entropy.steps)),
        stands=end is None,
        usual=not most,
        place=entropy.rows[place],
        places=int(kept.sum()),
        strength=ENTROPY_SHARE / max(float(share[row, place]), 1e-12),
        numbers={"share_of_ceiling": float(share[row, place]), "at_start": float(share[0, place])},
    )


def _large(logit: Grid) -> Iterator[Event]:
    large = np.isfinite(logit.values) & (logit.values > MAX_LOGIT)
    if (found := lasting(large)) is None:
        return
    row, kept = found
    place = int(np.flatnonzero(kept)[np.argmax(logit.values[row, kept])])
    yield Event(
        "attention_logits",
        "large attention logits",
        **logit.first_seen(row),
        evidence=f"the largest attention logit of {describe(logit.rows[place])} is {logit.values[row, place]:.3g} at "
        f"step {logit.steps[row]}; the limit is {MAX_LOGIT:g}",
        until=(end := until(large[:, place], row, logit.steps)),
        stands=end is None,
        usual=True,
        advice="Clip q and k (QK-clip), use QK-norm, or lower `lr`.",
        place=logit.rows[place],
        places=int(kept.sum()),
        strength=float(logit.values[row, place]) / MAX_LOGIT,
        numbers={"value": float(logit.values[row, place])},
    )
