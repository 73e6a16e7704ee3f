"""Attention that collapses onto one key, and logits that grow without bound."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event, detector
from ..evidence import Evidence
from ..order import describe
from ..series import lasting, times, until

# Attention entropy as a share of its ceiling, log of the number of keys, and of where it started (Zhai et al. 2023);
# the largest attention logit (QK-Clip's bound in Kimi K2).
ENTROPY_SHARE = 0.05  # of the ceiling
ENTROPY_FALL = 0.2  # of the share at the start
MAX_LOGIT = 100.0  # attention logit


@detector(
    "attention_collapse",
    "attention entropy collapse",
    reads={"attention": "probe attention"},
    rule=(
        "`attention.entropy`, `.ceiling`: < `ENTROPY_SHARE` of the ceiling and < `ENTROPY_FALL` of its start; large "
        "attention logits: `attention.max_logit` > `MAX_LOGIT`"
    ),
    remedy="Use QK-norm, or lower `lr`; against large logits, clip q and k (QK-clip).",
)
def attention_collapse(evidence: Evidence) -> Iterator[Event]:
    entropy, ceiling = evidence.grid("attention", "entropy"), evidence.grid("attention", "ceiling")
    if entropy is not None and ceiling is not None:
        share = times(np.where(entropy.absent, np.nan, entropy.values), ceiling.values)
        low = (share < ENTROPY_SHARE) & (share < ENTROPY_FALL * share[:1])
        if (found := lasting(low)) is not None:
            row, kept = found
            place = int(np.flatnonzero(kept)[0])
            yield Event(
                "attention_collapse",
                "attention entropy collapse",
                int(entropy.steps[row]),
                entropy.phase,
                f"the attention entropy of {describe(entropy.rows[place])} is {share[row, place]:.2g} of its largest "
                f"possible value at step {entropy.steps[row]}; at the start it was {share[0, place]:.2g}",
                after=entropy.before(row),
                until=(end := until(low[:, place], row, entropy.steps)),
                stands=end is None,
                place=entropy.rows[place],
                places=int(kept.sum()),
                probe=entropy.name,
                strength=ENTROPY_SHARE / max(float(share[row, place]), 1e-12),
                numbers={"share_of_ceiling": float(share[row, place]), "at_start": float(share[0, place])},
            )
    logit = evidence.grid("attention", "max_logit")
    if logit is not None:
        large = np.isfinite(logit.values) & (logit.values > MAX_LOGIT)
        if (found := lasting(large)) is not None:
            row, kept = found
            place = int(np.flatnonzero(kept)[np.argmax(logit.values[row, kept])])
            yield Event(
                "attention_logits",
                "large attention logits",
                int(logit.steps[row]),
                logit.phase,
                f"the largest attention logit of {describe(logit.rows[place])} is {logit.values[row, place]:.3g} at "
                f"step {logit.steps[row]}; the limit is {MAX_LOGIT:g}",
                after=logit.before(row),
                until=(end := until(large[:, place], row, logit.steps)),
                stands=end is None,
                advice="Clip q and k (QK-clip), use QK-norm, or lower `lr`.",
                place=logit.rows[place],
                places=int(kept.sum()),
                probe=logit.name,
                strength=float(logit.values[row, place]) / MAX_LOGIT,
                numbers={"value": float(logit.values[row, place])},
            )
