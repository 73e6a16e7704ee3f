"""Changes of a learning rate: jumps, returns to a former value, falls, and schedules that began again."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from .change import LEDGER, LoopChange

JUMP = 1.5  # a rate that changes by this factor in one update jumps, unless a ramp or a schedule goes on
RAMP = 1 / 3  # a ramp goes on where a neighbouring update changes the rate the same way, by at least this share
NEAR = 0.05  # a rate that is a former one, within this share
FOLLOWED = 3  # so many changes of the rate like those of the earlier course make a schedule that began again
ALIKE = 0.10  # two courses are alike within this share: the ledger stores gradual changes of 5 % each

Pairs = Mapping[int, tuple[Any, Any]]  # step -> rate of the update before, and of this one


def rate_changes(group: str, found: Pairs) -> Iterator[LoopChange]:
    """Yield the jumps of a group's rate. A fall, and a return to a former rate, are what schedules by hand and restarts
    do: they are not accused."""
    for step, (before, after) in found.items():
        if not jumps(found, step):
            continue
        factor = after / before if before else math.inf
        size = "" if math.isnan(factor) else f" (x{factor:.3g})"
        highest = is_highest(found, step)
        yield LoopChange(
            "rate" if highest else "return" if abs(after) > abs(before) else "fall",
            group,
            step,
            f"the learning rate of {group} changed from {before:g} to {after:g} at step {step}{size}",
            remedy=f"Set `lr` back from {after:g} to {before:g}, or warm it up from there.",
            accused=highest,
            factor=factor if size else None,
            until=_taken_back(found, step),
            lasts=True,
        )


def jumps(found: Pairs, step: int) -> bool:
    """Return True if a rate changes by the factor JUMP, and no ramp goes on."""
    before, after = found[step]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in (before, after)):
        return True
    low, high = sorted((abs(before), abs(after)))
    if high < JUMP * low or (low == high == 0):
        return False
    return not any(_is_like(found[other], (before, after)) for other in (step - 1, step + 1) if other in found)


def _is_like(other: tuple[Any, Any], pair: tuple[Any, Any]) -> bool:
    """Return True if a neighbouring change goes the same way by a comparable step: as a difference, or as a factor."""
    if not all(map(_is_number, other)):
        return False
    difference, theirs = pair[1] - pair[0], other[1] - other[0]
    if difference * theirs > 0 and abs(theirs) >= RAMP * abs(difference):
        return True
    factors = [math.log(b / a) if a > 0 and b > 0 else math.nan for a, b in (pair, other)]
    return factors[0] * factors[1] > 0 and abs(factors[1]) >= RAMP * abs(factors[0])


def is_highest(found: Pairs, step: int) -> bool:
    """Return True if a rate jumps above JUMP times all that the group had before."""
    before, after = found[step]
    return not math.isfinite(after) or abs(after) >= JUMP * max([abs(before), *_known(found, step)])


def restarts(group: str, first: tuple[int, float] | None, found: Pairs) -> Iterator[LoopChange]:
    """Yield the steps at which a schedule began again: the rate jumps to a former value and goes the way that it went
    from there, or jumps back to its first value. Restarts at even intervals, or at ones that grow by a constant factor,
    are a schedule with warm restarts, and not accused. ``first``: step and value of the first recorded rate."""
    if first is None:
        return
    course = [first, *((step, float(after)) for step, (_, after) in sorted(found.items()) if _is_number(after))]
    restarted: list[LoopChange] = []
    for step in sorted(found):
        before, after = found[step]
        if not (_is_number(before) and _is_number(after)) or not jumps(found, step) or is_highest(found, step):
            continue
        since = _former(course, step, float(after))
        again = since is not None and _goes_again(course, since, step)
        to_first = since == first[0] and abs(after) > abs(before)
        if since is None or not (again or to_first):
            continue
        restarted.append(
            LoopChange(
                "restart",
                group,
                step,
                f"the learning rate of {group} went at step {step} from {before:g} back to {after:g}, which it was at "
                f"step {since}: its schedule began again",
                f"{LEDGER}; the rate goes on as it did from step {since}" if again else LEDGER,
                f"Restore the scheduler's state at a resume, or set `last_epoch` to {step - 1}, so that `lr` goes on "
                f"from {before:g}.",
                factor=after / before if before else math.inf,
            )
        )
    planned = _is_planned([first[0], *(one.step for one in restarted)])
    yield from (replace(one, accused=not planned) for one in restarted)


def _goes_again(course: Sequence[tuple[int, float]], since: int, step: int) -> bool:
    """Return True if the rate goes from ``step`` on as it went from ``since`` on."""
    end = step + min(step - since, course[-1][0] - step)
    later = [(at, rate) for at, rate in course if step < at <= end]
    alike = all(math.isclose(rate, _at(course, since + at - step), rel_tol=ALIKE) for at, rate in later)
    return alike and len(later) >= FOLLOWED


def _former(course: Sequence[tuple[int, float]], step: int, rate: float) -> int | None:
    """Return the step before ``step`` at which the rate was this one: the first step of the run if the rate was it
    there, else the step at which it was nearest to it, of equal ones the last."""
    past = [(at, value) for at, value in course if at < step]
    if past and math.isclose(past[0][1], rate, rel_tol=NEAR):
        return past[0][0]
    near = [(abs(value - rate), -at) for at, value in past if math.isclose(value, rate, rel_tol=NEAR)]
    return -min(near)[1] if near else None


def _at(course: Sequence[tuple[int, float]], step: int) -> float:
    """Return the rate at a step: the last stored one."""
    return course[max(0, bisect_right(course, (step, math.inf)) - 1)][1]


def _is_planned(steps: Sequence[int]) -> bool:
    """Return True for at least two restarts, at even intervals or at ones that grow by a constant whole factor."""
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(gaps) < 2:
        return False
    factors = [later / earlier for earlier, later in pairwise(gaps)]
    return all(math.isclose(factor, max(1, round(factors[0])), rel_tol=0.02) for factor in factors)


def _taken_back(found: Pairs, step: int) -> int | None:
    """Return the first later step at which the rate is no more above all that it was before ``step``."""
    before, after = found[step]
    most = max([abs(before), *_known(found, step)]) if _is_number(before) else 0.0
    if _is_number(after) and abs(after) <= most:
        return step
    return next((at for at in sorted(found) if at > step and _is_number(found[at][1]) and found[at][1] <= most), None)


def _known(found: Pairs, step: int) -> list[float]:
    return [abs(one) for at, pair in found.items() if at < step for one in pair if isinstance(one, int | float)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
