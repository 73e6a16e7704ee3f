"""An effect's interval among its thresholds, as words and as a small mark."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

WIDTH, HEIGHT = 148, 18  # of a mark, in pixels
MARGIN = 0.12  # of the width, left beyond the outermost number
WIDE = 8  # a ratio of the outermost numbers, all above 0, beyond which the scale is logarithmic
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"


def interval(effect: Mapping[str, Any]) -> str:
    """``1.2 [0.9, 1.5]``."""
    if math.isnan(effect["mean"]):
        return "not measured"
    bounds = "" if math.isnan(effect["low"]) else f" [{effect['low']:.3g}, {effect['high']:.3g}]"
    return f"{effect['mean']:.3g}{bounds}"


def bounds(region: str) -> tuple[float, float] | None:
    """Low and high of a region as it prints itself: ``< 2``, ``> 2`` or ``in (1, 2)``; None for none."""
    found = [float(number) for number in re.findall(NUMBER, region)]
    if region.startswith("<") and found:
        return -math.inf, found[0]
    if region.startswith(">") and found:
        return found[0], math.inf
    return (found[0], found[1]) if len(found) == 2 else None


def mark(effect: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where mean, interval and regions stand, in pixels; None where nothing was measured.

    ``low`` and ``high`` are the interval's ends (the mean's place without one), ``regions`` are (kind, from, width).
    """
    if not math.isfinite(effect["mean"]):
        return None
    ends = [effect["mean"] if math.isnan(effect[name]) else effect[name] for name in ("low", "mean", "high")]
    known = [end for end in ends if math.isfinite(end)]
    regions = [(kind, bounds(effect[kind] or "")) for kind in ("reproduced", "contradicted")]
    limits = [end for _, region in regions if region for end in region if math.isfinite(end)]
    outermost = (min(known + limits), max(known + limits))
    log = outermost[0] > 0 and outermost[1] > WIDE * outermost[0]
    low, high = (math.log(end) if log else end for end in outermost)
    span = (high - low) or abs(high) or 1.0
    low, span = low - span * MARGIN, span * (1 + 2 * MARGIN)

    def place(value: float) -> float:
        if math.isinf(value):
            return 0.0 if value < 0 else float(WIDTH)
        scaled = -math.inf if log and value <= 0 else math.log(value) if log else value
        return round(min(max((scaled - low) / span, 0.0), 1.0) * WIDTH, 1)

    return {
        "low": place(ends[0]),
        "mean": place(ends[1]),
        "high": place(ends[2]),
        "regions": [(kind, place(r[0]), round(place(r[1]) - place(r[0]), 1)) for kind, r in regions if r],
    }
