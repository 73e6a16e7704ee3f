"""The interval of an effect beside its thresholds, as words and as a small mark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WIDTH, HEIGHT = 148, 18  # size of a mark, in pixels
MARGIN = 0.12  # share of the width, beyond the outermost number


def interval(effect: Mapping[str, Any]) -> str:
    """Writes ``1.2 [0.9, 1.5]``."""
    if math.isnan(effect["mean"]):
        return "not measured"
    bounds = "" if math.isnan(effect["low"]) else f" [{effect['low']:.3g}, {effect['high']:.3g}]"
    return f"{effect['mean']:.3g}{bounds}"


def mark(effect: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the places of mean, interval and regions in pixels; None if nothing was measured.

    ``low`` and ``high`` are the interval's ends (the mean's place without one), ``regions`` are (kind, from, width).
    """
    if not math.isfinite(effect["mean"]):
        return None
    ends = [effect["mean"] if math.isnan(effect[name]) else effect[name] for name in ("low", "mean", "high")]
    known = [end for end in ends if math.isfinite(end)]
    regions = [(kind, effect[kind]) for kind in ("reproduced", "contradicted") if effect[kind] is not None]
    limits = [end for _, region in regions for end in (region.low, region.high) if math.isfinite(end)]
    outermost = (min(known + limits), max(known + limits))
    log = effect["log"] and outermost[0] > 0
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
        "regions": [(kind, place(r.low), round(place(r.high) - place(r.low), 1)) for kind, r in regions],
    }
