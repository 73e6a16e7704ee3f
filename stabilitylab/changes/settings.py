"""Changes of the settings of parameter groups: the learning rate, betas, eps, weight decay and all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from .change import Fact, LoopChange, group_and_key, is_first
from .rates import Pairs, rate_changes, restarts

OFTEN = 3  # a setting that changes in so many updates on end is a schedule
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that a ledger writes as text
SHAPE = ("foreach", "fused", "capturable", "differentiable", "initial_lr")  # settings that change no update
CYCLED = ("betas", "momentum")  # settings that a scheduler of the rate moves too


def setting_changes(facts: Sequence[Fact], scheduled: bool) -> Iterator[LoopChange]:
    """Yield changes of settings. ``scheduled``: the loop declares a scheduler, which moves the rate and momentum."""
    changes: dict[str, dict[int, tuple[Any, Any]]] = defaultdict(dict)
    first: dict[str, tuple[int, Any]] = {}
    for fact in facts:
        if fact["kind"] != "setting" or fact["name"].endswith(SHAPE):
            continue
        before, after = (float(one) if one in NOT_FINITE else one for one in (fact["before"], fact["after"]))
        if is_first(fact):
            first.setdefault(fact["name"], (fact["step"], after))
            changes[fact["name"]] = changes[fact["name"]]
        else:
            changes[fact["name"]][fact["step"]] = before, after
    for name, found in changes.items():
        group, key = group_and_key(name)
        if key == "lr":
            if not scheduled:
                yield from rate_changes(group, found)
                yield from restarts(group, first.get(name), found)
            continue
        for step, (before, after) in found.items():
            if not (scheduled and key in CYCLED) and not _goes_on(found, step):
                yield LoopChange(
                    "setting",
                    name,
                    step,
                    f"{key} of {group} changed from {before} to {after} at step {step}",
                    remedy=f"Set `{key}` back from {_brief(after)} to {_brief(before)}.",
                    until=next((at for at in sorted(found) if at > step and found[at][1] == before), None),
                    lasts=True,
                    is_rare=len(found) < OFTEN,
                )


def _goes_on(found: Pairs, step: int) -> bool:
    """Return True if the setting changes in at least OFTEN updates on end, this one among them."""
    first = last = step
    while first - 1 in found:
        first -= 1
    while last + 1 in found:
        last += 1
    return last - first + 1 >= OFTEN


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_brief, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
