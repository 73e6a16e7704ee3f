"""The critical learning rate: the rate along an update at which the loss begins to rise, from forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

WIDEN = 1.25  # factor of the first step away from a guess; each further step is twice as long in logs
FAR = 1e3  # largest factor beyond the tried rates: far above the crossing a loss may fall again, as logits collapse
TOLERANCE = 1.06  # high / low at which a search ends: the rate is known to 3 %
BELOW = 3  # number of halvings of a crossing at which a search looks for an earlier one
UNSURE = 2.0  # largest high / low at which a crossing counts as found if the loss is noisy, or the search may end


@dataclass(frozen=True)
class Critical:
    """The result of a search for the critical rate. ``rate``: the geometric middle of ``low``, where the loss did not
    rise, and ``high``, where it did.

    ``state``: "beyond" if the loss rose at no rate that was tried (``rate`` is the largest of them, ``high`` infinite),
    "below" if it rose at all of them (``rate`` is the smallest, ``low`` 0), "noise" if the loss changed by less than
    the noise floor on one side of the crossing or on both. ``passes``: the number of forwards that were needed.
    """

    rate: float
    low: float
    high: float
    passes: int
    state: Literal["found", "beyond", "below", "noise"] = "found"

    @property
    def sharpness(self) -> float:
        """2 over the critical rate. For a quadratic loss and the direction of its gradient this is the curvature along
        that direction."""
        return 2 / self.rate if self.rate > 0 else math.inf


Points = list[tuple[float, float]]  # (rate, rise of the loss at that rate)


def critical_rate(
    loss_at: Callable[[float], float],
    base: float,
    guess: float,
    *,
    passes: int = 16,
    far: int = 0,
    tolerance: float = TOLERANCE,
    floor: float = 0.0,
    first: bool = False,
) -> Critical:
    """Find a rate beyond which the loss lies above ``base``; the search starts from ``guess`` > 0.

    ``loss_at(rate)`` is the loss after one update at that rate along a fixed direction. ``base`` is the loss without
    the update. A loss that is not finite has risen. The search brackets the rate by growing factors, or by the point
    where a quadratic through earlier points crosses. Then it halves the bracket in logs, with at most ``passes``
    evaluations. Four evaluations suffice if the guess is the last row's rate and lies within a quarter of the new one;
    if they leave a bracket wider than a factor of 2, or none, the search goes on up to ``far`` evaluations.
    If the loss crosses ``base`` several times, the search finds a crossing near the guess, which need not be the first
    one.

    ``first``: find the smallest rate at which the loss rises, as the paper defines the critical rate. The search then
    looks at 1/2, 1/4 and 1/8 of a crossing too (beyond ``passes``) and goes on below if the loss has risen there.
    ``floor``: the change of the loss without an update (its noise). A crossing is found if the loss fell by more than
    the floor below it and rose by more above it, at rates a factor of 2 apart or less (or as far as ``passes`` left the
    bracket without noise). If the search saw no such rates, up to two more are tried.

    Source: Kalra et al. 2026 (2601.16979), who call 2 / rate the critical sharpness. Raises ValueError for a guess that
    is not positive.
    """
    if not (guess > 0 and math.isfinite(guess)):
        raise ValueError(f"the guess of a critical rate is {guess}: give a positive number, such as the present rate.")
    points: Points = []

    def rise(rate: float) -> float:
        points.append((rate, loss_at(rate) - base))
        return points[-1][1]

    low, high = _bracket(rise, points, guess, passes, far, tolerance)
    if first:
        low, high = _first(rise, low, high, tolerance, floor)
    if floor > 0:
        return _clear(rise, points, low, high, floor)
    return _told(low, high, len(points))


def _bracket(
    rise: Callable[[float], float], points: Points, guess: float, passes: int, far: int, tolerance: float
) -> tuple[float, float]:
    low, high, rate, step, most = 0.0, math.inf, guess, WIDEN, passes
    beside = tolerance**0.45  # two evaluations this far on either side of the crossing end the search
    while len(points) < most:
        if rise(rate) <= 0:
            low = rate
        else:
            high = rate
        if low > 0 and high <= low * tolerance:
            break
        if len(points) == passes and high > low * UNSURE:
            most = far
        told = crossing(points) if len(points) % 4 else math.nan  # every fourth step goes without the quadratic
        if low > 0 and math.isfinite(high):
            rate = math.sqrt(low * high)
            if high > low * WIDEN * tolerance and low < told < high and len(points) % 2:
                aside = told * beside if told * told < low * high else told / beside
                rate = aside if low < aside < high else rate
        elif low > 0:
            rate = min(max(told * beside, low * WIDEN) if told > low else low * step, low * FAR)
            step *= step
        else:
            rate = max(min(told / beside, high / WIDEN) if 0 < told < high else high / step, high / FAR)
            step *= step
    return low, high


def _first(
    rise: Callable[[float], float], low: float, high: float, tolerance: float, floor: float
) -> tuple[float, float]:
    """Return the bracket of the lowest crossing that halvings below ``low`` show, as narrow as ``tolerance``."""
    if low == 0:
        return low, high
    rates = [low / 2**n for n in range(1, BELOW + 1)]
    risen = [rate for rate in rates if not rise(rate) <= floor]
    if not risen:
        return low, high
    high = min(risen)
    low = max((rate for rate in rates if rate < high), default=0.0)
    while low > 0 and high > low * tolerance:
        rate = math.sqrt(low * high)
        low, high = (rate, high) if rise(rate) <= floor else (low, rate)
    return low, high


def _clear(rise: Callable[[float], float], points: Points, low: float, high: float, floor: float) -> Critical:
    """Return the crossing between the nearest rates at which the loss fell and rose by more than its noise."""

    def ends() -> tuple[float, float]:
        fell = [rate for rate, by in points if rate <= low and by < -floor]
        rose = [rate for rate, by in points if rate >= high and not by <= floor]
        return max(fell, default=0.0), min(rose, default=math.inf)

    if low > 0 and math.isfinite(high):
        middle, (clear_low, clear_high) = math.sqrt(low * high), ends()
        widest = max(UNSURE, high / low)  # a bracket that is wide for lack of passes is not noisy
        aside = math.sqrt(widest)
        if clear_low * widest < clear_high:
            if clear_low < low:
                rise(middle / aside)
            if clear_high > high:
                rise(middle * aside)
            clear_low, clear_high = ends()
        if clear_high <= clear_low * widest * (1 + 1e-9):
            return _told(clear_low, clear_high, len(points))
        return Critical(middle, low, high, len(points), "noise")
    clear_low, clear_high = ends()
    if (low == 0 and math.isinf(clear_high)) or (math.isinf(high) and clear_low == 0):
        return Critical(high if low == 0 else low, low, high, len(points), "noise")
    return _told(low if low == 0 else clear_low, high if math.isinf(high) else clear_high, len(points))


def _told(low: float, high: float, used: int) -> Critical:
    if low == 0:
        return Critical(high, low, high, used, "below")
    if math.isinf(high):
        return Critical(low, low, high, used, "beyond")
    return Critical(math.sqrt(low * high), low, high, used)


def crossing(points: Sequence[tuple[float, float]]) -> float:
    """Return the rate r at which a loss is back at its level at 0, given its rise d at some rates: the zero of d / r,
    which is a straight line in r for a quadratic loss. The line goes through two neighbours of different sign, or else
    through the two points next to the zero. The result is 0 if the loss rises from the start, and NaN if two points do
    not tell."""
    known = sorted((rate, rise / rate) for rate, rise in points if math.isfinite(rise))
    if len(known) < 2:
        return math.nan
    across = [pair for pair in pairwise(known) if pair[0][1] <= 0 < pair[1][1]]
    (a, slope_a), (b, slope_b) = across[0] if across else sorted(sorted(known, key=lambda point: abs(point[1]))[:2])
    if slope_b <= slope_a or a == b:
        return math.nan
    return max(0.0, a - slope_a * (b - a) / (slope_b - slope_a))
