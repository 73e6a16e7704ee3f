"""The critical learning rate: how far one may go along an update before the loss rises, from forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

WIDEN = 1.25  # factor of the first step away from a guess; each further one goes as far again in logs
FAR = 1e3  # the furthest that a quadratic is believed beyond what was seen
TOLERANCE = 1.06  # high over low at which a search ends: the rate is known to 3 %


@dataclass(frozen=True)
class Critical:
    """``rate``: the geometric middle of ``low``, where the loss did not rise, and ``high``, where it did.

    ``state``: "beyond" where it rose at no rate that was tried (``rate`` is the largest of them, ``high`` infinite),
    "below" where it rose at all of them (``rate`` is the smallest, ``low`` 0). ``passes``: forwards that were needed.
    """

    rate: float
    low: float
    high: float
    passes: int
    state: Literal["found", "beyond", "below"] = "found"

    @property
    def sharpness(self) -> float:
        """2 over the critical rate: of a quadratic loss and the direction of its gradient the curvature along it."""
        return 2 / self.rate if self.rate > 0 else math.inf


def critical_rate(
    loss_at: Callable[[float], float], base: float, guess: float, *, passes: int = 16, tolerance: float = TOLERANCE
) -> Critical:
    """A rate beyond which the loss lies above ``base``, searched from ``guess`` > 0 on.

    ``loss_at(rate)`` is the loss after one update at that rate along a fixed direction, ``base`` the loss without it; a
    loss that is not finite has risen. Brackets by growing factors, or by where a quadratic through what was seen
    crosses, then halves the bracket in logs, with at most ``passes`` evaluations: four suffice where the last row's
    rate is the guess and lies within a quarter. Where the loss crosses ``base`` several times, it is a crossing near
    the guess and need not be the first one.

    Kalra et al. 2026 (2601.16979), who call 2 over it the critical sharpness. Raises ValueError for a guess that is
    not positive.
    """
    if not (guess > 0 and math.isfinite(guess)):
        raise ValueError(f"the guess of a critical rate is {guess}: give a positive number, such as the present rate.")
    low, high, rate, step = 0.0, math.inf, guess, WIDEN
    points: list[tuple[float, float]] = []
    beside = tolerance**0.45  # two evaluations this far on either side of the crossing end the search
    while len(points) < passes:
        rise = loss_at(rate) - base
        points.append((rate, rise))
        if rise <= 0:
            low = rate
        else:
            high = rate
        if low > 0 and high <= low * tolerance:
            break
        told = crossing(points) if len(points) % 4 else math.nan  # never trusted without end
        if low > 0 and math.isfinite(high):
            rate = math.sqrt(low * high)
            if high > low * WIDEN * tolerance and low < told < high and len(points) % 2:
                aside = told * beside if told * told < low * high else told / beside
                rate = aside if low < aside < high else rate
        elif low > 0:
            rate = min(max(told * beside, low * WIDEN), low * FAR) if told > low else low * step
            step *= step
        else:
            rate = max(min(told / beside, high / WIDEN), high / FAR) if 0 < told < high else high / step
            step *= step
    used = len(points)
    if low == 0:
        return Critical(high, low, high, used, "below")
    if math.isinf(high):
        return Critical(low, low, high, used, "beyond")
    return Critical(math.sqrt(low * high), low, high, used)


def crossing(points: Sequence[tuple[float, float]]) -> float:
    """Where a loss that has risen by d at each rate r is back at 0: the zero of d / r, a straight line for a quadratic
    loss, through two neighbours of different sign or else the two points next to it. 0 where it rises from the start,
    NaN where two points do not tell."""
    known = sorted((rate, rise / rate) for rate, rise in points if math.isfinite(rise))
    if len(known) < 2:
        return math.nan
    across = [pair for pair in pairwise(known) if pair[0][1] <= 0 < pair[1][1]]
    (a, slope_a), (b, slope_b) = across[0] if across else sorted(sorted(known, key=lambda point: abs(point[1]))[:2])
    if slope_b <= slope_a or a == b:
        return math.nan
    return max(0.0, a - slope_a * (b - a) / (slope_b - slope_a))
