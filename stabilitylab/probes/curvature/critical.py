"""The critical learning rate: how far one may go along an update before the loss rises, from forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

WIDEN = 1.25  # factor of the first step away from a guess; each further one goes as far again in logs
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
    loss that is not finite has risen. Brackets by growing factors, then halves the bracket in logs, with at most
    ``passes`` evaluations: four suffice where the last row's rate is the guess and lies within a quarter. Where the
    loss crosses ``base`` several times, it is a crossing near the guess and need not be the first one.

    Kalra et al. 2026 (2601.16979), who call 2 over it the critical sharpness. Raises ValueError for a guess that is
    not positive.
    """
    if not (guess > 0 and math.isfinite(guess)):
        raise ValueError(f"the guess of a critical rate is {guess}: give a positive number, such as the present rate.")
    low, high, rate, step = 0.0, math.inf, guess, WIDEN
    used = 0
    while used < passes:
        used += 1
        if loss_at(rate) <= base:
            low = rate
        else:
            high = rate
        if low > 0 and high <= low * tolerance:
            break
        if low > 0 and math.isfinite(high):
            rate = math.sqrt(low * high)
        else:
            rate = low * step if low > 0 else high / step
            step *= step
    if low == 0:
        return Critical(high, low, high, used, "below")
    if math.isinf(high):
        return Critical(low, low, high, used, "beyond")
    return Critical(math.sqrt(low * high), low, high, used)
