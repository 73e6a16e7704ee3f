"""Eval mode: the loss must be the same twice, and no dropout active."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from .bounds import not_checked, weigh
from .result import Check
from .seen import Seen

DROPOUT, REPEATS = "dropout in eval mode", "evaluation repeats"


def repeats(first: Seen, second: Seen) -> Iterator[Check]:
    """Compare two passes in eval mode, on one batch, with different random numbers."""
    active = Counter(first.dropouts)
    named = ", ".join(f"{name} ({count}x)" for name, count in active.items())
    yield weigh(DROPOUT, float(len(first.dropouts)), f"active: {named}" if named else "no dropout is active")
    if first.loss is None or second.loss is None:
        yield not_checked(REPEATS, "there is no loss")
        return
    one, two = float(first.loss.detach()), float(second.loss.detach())
    if not math.isfinite(one + two):
        yield not_checked(REPEATS, f"the loss is {one:g} and {two:g} in two passes")
        return
    apart = abs(one - two) / max(abs(one), abs(two), 1e-12)
    yield weigh(REPEATS, apart, f"the loss is {one:.6g} and {two:.6g} in two passes")
