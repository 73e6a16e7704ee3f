"""How much further one could go along an update before the loss rises: forward passes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..base import CurvatureProbe, probe
from ..curvature.critical import critical_rate, crossing
from ..curvature.landscape import PARTS, Landscape
from ..rules import Mean

START = 0.01  # share of the parameters' length where a search begins: far less is lost in bf16's rounding
COLD, WARM = 16, 4  # forwards beside that of theta_t itself: until a rate was found, and from then on


@probe(
    "critical_sharpness",
    on="curvature",
    unit={
        "value": "1 / learning rate",
        "headroom": "learning rates",
        "critical_rate": "learning rate",
        **dict.fromkeys(("low", "high", "least", "most"), "learning rates"),
        "forwards": "forward passes",
    },
    columns={
        "value": Mean(),
        "headroom": Mean(),
        "critical_rate": Mean(),
        "low": Mean(),
        "high": Mean(),
        "least": Mean(),
        "most": Mean(),
        "forwards": Mean(),
    },
    main="headroom",
    log=True,
)
class CriticalSharpness(CurvatureProbe):
    """value: 2 / critical_rate, the largest learning rate along this row's update at which the loss of a fixed batch
    does not rise; headroom: critical_rate over the present learning rate (1: this update just left the loss as it was).
    low, high: headroom between which the crossing was found, 6 % apart or less unless 4 forwards did not suffice; high
    is missing where the loss rose at no rate that was tried, low where it rose at all: then headroom is a bound. least,
    most: where the loss of each of three thirds of the batch crosses, by a quadratic through the same forwards (0: it
    rises from the start), missing where that cannot be told. Kalra et al. 2026 (2601.16979).

    Look for a headroom that falls to 1 and stays below: the loss of this batch rises with each update.

    Cost: 5 forward passes a row (the first takes up to 17) and two copies of the parameters.
    """

    def look(self, landscape: Landscape, memory: dict[str, Any]) -> Mapping[str, float]:
        lr = landscape.rate
        base = landscape.base()
        known = memory.get("rate") if lr > 0 else memory.get("headroom")
        tried: list[tuple[float, list[float]]] = []

        def rise(share: float) -> float:
            whole, *parts = landscape.rises(base, share).tolist()
            tried.append((share, parts))
            return whole

        guess = known / lr if known and lr > 0 else known or START / landscape.relative
        found = critical_rate(rise, 0.0, guess, passes=WARM if known else COLD)
        memory["headroom"], memory["rate"] = found.rate, found.rate * lr
        numbers = {"headroom": found.rate, "forwards": float(landscape.count)}
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
