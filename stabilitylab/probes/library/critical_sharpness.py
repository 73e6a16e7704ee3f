"""The factor by which an update could be longer before the loss rises, measured with forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...decisive import BOUND, FOUND, NOISE
from ..base import CurvatureProbe, probe
from ..curvature.critical import critical_rate, crossing
from ..curvature.landscape import PARTS, Landscape
from ..rules import Mean

START = 0.01  # share of the parameters' length where a search begins: far less is lost in bf16's rounding
# Forwards beside those at theta_t itself: where no rate is known or the new one is far away, near the last rate, and
# near it for a first crossing.
COLD, WARM, WARM_FIRST = 15, 4, 6
STANDARD_ERRORS = 3.0  # of the loss's noise, from which on a change of the loss counts
KEPT = 0.7  # share of the last rows' squared noise that a row's own is averaged with
UNITS = {  # of each column
    "value": "1 / learning rate",
    "headroom": "learning rates",
    "critical_rate": "learning rate",
    **dict.fromkeys(("low", "high", "least", "most"), "learning rates"),
    "forwards": "forward passes",
    "state": "1 found, 0 bound, -1 noise",
    "noise": "loss",
}
STATES = {"found": FOUND, "beyond": BOUND, "below": BOUND, "noise": NOISE}


@probe(
    "critical_sharpness",
    on="curvature",
    unit=UNITS,
    columns=dict.fromkeys(UNITS, Mean()),
    main="headroom",
    log=True,
)
class CriticalSharpness(CurvatureProbe):
    """The largest learning rate along this row's update at which the loss of a fixed batch does not rise
    (``critical_rate``), and numbers derived from it. ``headroom``: critical_rate / the present learning rate (1: this
    update left the loss just as it was). ``value``: 2 / critical_rate. With ``curvature_batch="update"`` the loss is
    that of the batch from which the update was made, and critical_rate is the smallest rate at which the loss rises, as
    Kalra et al. 2026 (2601.16979) define it. ``state``: 1 = found; 0 = bound: the loss rose at none of the tried rates
    (``high`` is missing) or at all of them (``low`` is missing); -1 = noise: on one side of the crossing the loss
    changes by less than ``noise``. Only rows that are found decide anything. ``low``, ``high``: the headroom between
    which the crossing was found, 6 % apart or less, unless the forwards did not suffice or the loss is noisy.
    ``noise``: three standard errors of the loss at theta_t, from two evaluations, and at least three standard errors of
    its rounding. ``least``, ``most``: the smallest and the largest headroom of three thirds of the batch, each from a
    quadratic through the same forwards (0: the loss of this third rises from the start); they are missing where a
    third's crossing cannot be determined. ``forwards``: the number of forward passes of the row.

    Look for a headroom that falls to 1 and stays below: each update then raises the loss of this batch.

    Cost: 5 forward passes a row, and 6 if the loss differs from one evaluation to the next. Up to 17 are needed for
    the first row, for a row whose rate is far from the last one, and for a row after a bound or after noise, where the
    search begins anew. A noisy loss takes up to 2 more. The batch of the update takes up to 5 more. Two copies of the
    parameters are kept.
    """

    def look(self, landscape: Landscape, memory: dict[str, Any]) -> Mapping[str, float]:
        lr = landscape.rate
        base = landscape.base()
        known = memory.get("rate") if lr > 0 else memory.get("headroom")
        floor = self._noise(landscape, base, memory, cold=not known)
        tried: list[tuple[float, list[float]]] = []

        def rise(share: float) -> float:
            whole, *parts = landscape.rises(base, share).tolist()
            tried.append((share, parts))
            return whole

        guess = known / lr if known and lr > 0 else known or START / landscape.relative
        passes = COLD if not known else WARM_FIRST if landscape.of_update else WARM
        found = critical_rate(rise, 0.0, guess, passes=passes, far=COLD, floor=floor, first=landscape.of_update)
        if found.state == "found":
            memory["headroom"], memory["rate"] = found.rate, found.rate * lr
        else:
            for name in ("headroom", "rate"):  # the next row searches from the start again
                memory.pop(name, None)
        numbers = {"headroom": found.rate, "forwards": float(landscape.count)}
        numbers |= {"state": STATES[found.state], "noise": floor}
        if lr > 0:
            numbers |= {"value": found.sharpness / lr, "critical_rate": found.rate * lr}
        if found.low > 0:
            numbers["low"] = found.low
        if math.isfinite(found.high):
            numbers["high"] = found.high
        parts = [crossing([(share, rises[n]) for share, rises in tried]) for n in range(PARTS)]
        if all(map(math.isfinite, parts)):
            numbers |= {"least": min(parts), "most": max(parts)}
        return numbers

    @staticmethod
    def _noise(landscape: Landscape, base: Tensor, memory: dict[str, Any], cold: bool) -> float:
        """Return the noise floor. A loss that was the same twice at the first row is not evaluated twice again before
        the next cold search."""
        square = float(memory.get("noise", 0.0))
        differs, rounding = landscape.noise(base, again=cold or square > 0)
        if cold or square > 0:
            square = differs**2 if square == 0 else KEPT * square + (1 - KEPT) * differs**2
            memory["noise"] = square
        return STANDARD_ERRORS * math.hypot(max(differs, math.sqrt(square)), rounding)
