"""The learning rate of a run, and its jumps, from the metric ``lr`` or ``learning_rate`` of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

METRICS = ("lr", "learning_rate")
# As diagnose's detector lr_jump has it: schedules and restarts come back to the maximum, or grow by per cents.
JUMP = 3.0  # learning rate over its maximum so far
LEAST = 4  # earlier rows with a rate
WITHIN = 50  # updates before an alert in which it names a jump: about as many as its row is compared with


@dataclass(frozen=True)
class RateJump:
    """A jump of the learning rate: its step, the largest rate before, and the rate of that step."""

    step: int
    before: float
    after: float

    @property
    def sentence(self) -> str:
        """Return the jump as a sentence: ``The learning rate rose 100-fold at step 40, from 0.001 to 0.1.``"""
        fold = self.after / self.before
        digits = 0 if fold >= 10 else 1
        return (
            f"The learning rate rose {fold:.{digits}f}-fold at step {self.step}, from {self.before:.3g} "
            f"to {self.after:.3g}."
        )

    @property
    def advice(self) -> str:
        return f"check the schedule and what a resume restored, and go back to a checkpoint before step {self.step}"


class Rates:
    """Reads the rate of each row and keeps the last jump: more than 3 times the largest rate so far, after at least 4
    rows with a positive rate."""

    def __init__(self) -> None:
        self._largest, self._rows, self._step = 0.0, 0, -1
        self._jump: RateJump | None = None

    def read(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take the rate of a row. A row that comes in two parts counts once."""
        rate = next((value for name in METRICS if (value := metrics.get(name)) is not None), math.nan)
        if step == self._step or not (math.isfinite(rate) and rate > 0):
            return
        if self._rows >= LEAST and rate > JUMP * self._largest:
            self._jump = RateJump(step, self._largest, rate)
        self._largest, self._rows, self._step = max(self._largest, rate), self._rows + 1, step

    def jump(self, step: int) -> RateJump | None:
        """Return the last jump, if it came in the 50 updates up to ``step``."""
        recent = self._jump is not None and step - self._jump.step <= WITHIN
        return self._jump if recent else None

    def state_dict(self) -> dict[str, Any]:
        """Return the largest rate and the last jump, in JSON's types."""
        jump = None if self._jump is None else asdict(self._jump)
        return {"largest": self._largest, "rows": self._rows, "step": self._step, "jump": jump}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._largest, self._rows, self._step = state["largest"], state["rows"], state["step"]
        self._jump = state["jump"] and RateJump(**state["jump"])
