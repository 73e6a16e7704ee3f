"""The distance of a run from the highest stable rate on its fixed batch, as critical_sharpness last recorded it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..decisive import NOISE
from .evidence import Evidence

TABLE = "critical_sharpness"
WIDE = 1.2  # high / low from which on both are said


def headroom(evidence: Evidence) -> str:
    """Return a sentence such as ``on the fixed batch the loss would rise at 12 times the learning rate of step 800,
    0.0003 (8.1 to 16 over three parts of it; 30 at step 0)``; "" if the table was not recorded.

    The sentence is about the last row whose loss changes by more than its noise. If only one side of the critical rate
    was seen in that row, the sentence gives a bound; if the two sides are far apart, both.
    """
    names = ("headroom", "low", "high", "least", "most", "state", "critical_rate")
    own = {name: evidence.grid(TABLE, name) for name in names}
    grid, state = own["headroom"], own["state"]
    if grid is None:
        return ""
    batch = "the batch of each update" if _of_updates(evidence) else "the fixed batch"
    finite = np.isfinite(grid.values[:, 0])
    clear = finite if state is None else finite & (state.values[:, 0] > NOISE)
    if not clear.any():
        few = f"in all of {int(finite.sum())} rows its loss changes less than its noise"
        return f"on {batch} nothing can be said of headroom, since {few}" if finite.any() else ""
    last, known = int(np.flatnonzero(clear)[-1]), evidence.decisive(TABLE, "headroom")

    def at(name: str) -> float:
        found = own[name]
        return math.nan if found is None else float(found.values[last, 0])

    step, times, rate = int(grid.steps[last]), at("headroom"), at("critical_rate")
    low, high = at("low"), at("high")
    if math.isfinite(high) and low > 0:
        told = f"{low:.3g} to {high:.3g}" if high > WIDE * low else f"{times:.3g}"
    else:
        told = f"{'more' if low > 0 else 'less'} than {times:.3g}"
    more = [f"{at('least'):.3g} to {at('most'):.3g} over three parts of it"] if math.isfinite(at("most")) else []
    if known is not None and len(known.steps) and known.steps[0] < step:
        more.append(f"{float(known.values[0, 0]):.3g} at step {int(known.steps[0])}")
    own_rate = f", {rate / times:.3g}" if math.isfinite(rate) and times > 0 else ""
    aside = f" ({'; '.join(more)})" if more else ""
    return f"on {batch} the loss would rise at {told} times the learning rate of step {step}{own_rate}{aside}"


def _of_updates(evidence: Evidence) -> bool:
    """True if each row measured the batch of its own update."""
    manifest = evidence.run.manifest
    config = manifest.get("config")
    probes = config.get("probes") if isinstance(config, Mapping) else None
    own = probes.get("curvature_batch") if isinstance(probes, Mapping) else None
    return "update" in (manifest.get("curvature_batch"), own)
