"""What status.json says of a run that was never trained."""

from __future__ import annotations

from typing import Any

from stabilitylab.verdict import Verdict


def made_verdict(state: Any, gap: float = -1.0, step: int = 0, reason: str = "made up") -> dict[str, Any]:
    return Verdict(state, step, reason, gap, 0.1).recorded()
