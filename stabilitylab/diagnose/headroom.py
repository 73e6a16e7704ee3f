"""How far a run stood from the edge of its fixed batch, in a sentence: what critical_sharpness recorded last."""

from __future__ import annotations

import math

from .evidence import Evidence

TABLE = "critical_sharpness"


def headroom(evidence: Evidence) -> str:
    """Such as ``on the fixed batch the loss would rise at 12 times the present rate (8.1 to 16 over three parts of it;
    step 800; 30 at step 0)``; "" where it was not recorded."""
    own = {name: evidence.grid(TABLE, name) for name in ("headroom", "low", "high", "least", "most")}
    grid = own["headroom"]
    if grid is None:
        return ""
    known = [place for place in range(len(grid.steps)) if math.isfinite(grid.values[place, 0])]
    if not known:
        return ""
    last = known[-1]

    def at(name: str) -> float:
        found = own[name]
        return math.nan if found is None else float(found.values[last, 0])

    times = at("headroom")
    bound = "" if math.isfinite(at("high")) and at("low") > 0 else "more than " if at("low") > 0 else "less than "
    spread = f"{at('least'):.3g} to {at('most'):.3g} over three parts of it; " if math.isfinite(at("most")) else ""
    first = "" if len(known) < 2 else f"; {float(grid.values[known[0], 0]):.3g} at step {int(grid.steps[known[0]])}"
    step = int(grid.steps[last])
    told = f"on the fixed batch the loss would rise at {bound}{times:.3g} times the present rate"
    return f"{told} ({spread}step {step}{first})"
