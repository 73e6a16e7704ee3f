"""The distance of a run from the highest stable rate on its fixed batch, as critical_sharpness last recorded it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..decisive import NOISE
from .evidence import Evidence

TABLE = "critical_sharpness"


def headroom(evidence: Evidence) -> str:
    """Return a sentence such as ``on the fixed batch the loss would rise at 12 times the present rate (8.1 to 16 over
    three parts of it; step 800; 30 at step 0)``; "" if the table was not recorded.

    The sentence is about the last row whose loss changes by more than its noise. If only one side of the critical rate
    was seen in that row, the sentence gives a bound.
    """
    own = {name: evidence.grid(TABLE, name) for name in ("headroom", "low", "high", "least", "most", "state")}
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

    times = at("headroom")
    bound = "" if math.isfinite(at("high")) and at("low") > 0 else "more than " if at("low") > 0 else "less than "
    spread = f"{at('least'):.3g} to {at('most'):.3g} over three parts of it; " if math.isfinite(at("most")) else ""
    step = int(grid.steps[last])
    first = ""
    if known is not None and len(known.steps) and known.steps[0] < step:
        first = f"; {float(known.values[0, 0]):.3g} at step {int(known.steps[0])}"
    told = f"on {batch} the loss would rise at {bound}{times:.3g} times the present rate"
    return f"{told} ({spread}step {step}{first})"


def _of_updates(evidence: Evidence) -> bool:
    """True if each row measured the batch of its own update."""
    manifest = evidence.run.manifest
    config = manifest.get("config")
    probes = config.get("probes") if isinstance(config, Mapping) else None
    own = probes.get("curvature_batch") if isinstance(probes, Mapping) else None
    return "update" in (manifest.get("curvature_batch"), own)
