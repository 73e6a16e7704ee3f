"""The learning rate of a run, and its jumps: from the metric ``lr`` or ``learning_rate`` of each row, and from the
ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

METRICS = ("lr", "learning_rate")
LR = " lr"  # end of a fact's name: the learning rate of a parameter group
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
        fold = f"{self.after / self.before:.3g}-fold"
        return f"The learning rate rose {fold} at step {self.step}, from {self.before:.3g} to {self.after:.3g}."

    @property
    def advice(self) -> str:
        return f"check the schedule and what a resume restored, and go back to a checkpoint before step {self.step}"


class Rates:
    """Reads the learning rate of each row, and those of parameter groups in the ledger, and keeps the last jump: a rate
    of more than 3 times the largest so far, of the same group. A row's rate is compared from the fifth rate on, a
    group's from update 4 on."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}  # by parameter group; "": the row's metric
        self._rows, self._step = 0, -1
        self._jump: RateJump | None = None

    def read(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take the rate of a row. A row that comes in two parts counts once."""
        rate = next((value for name in METRICS if (value := metrics.get(name)) is not None), None)
        if step != self._step and _is_rate(rate):
            self._take("", step, rate, self._rows >= LEAST)
            self._rows, self._step = self._rows + 1, step

    def read_ledger(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Take the facts of a ledger, of which the learning rates of parameter groups count."""
        for fact in facts:
            name, step, rate = (fact.get(key) for key in ("name", "step", "after"))
            if fact.get("kind") == "setting" and str(name).endswith(LR) and _is_rate(rate) and isinstance(step, int):
                self._take(str(name), step, rate, step >= LEAST)

    def _take(self, group: str, step: int, rate: float, compared: bool) -> None:
        before = self._largest.get(group, 0.0)
        known = self._jump is not None and self._jump.step == step
        if compared and not known and 0 < JUMP * before < rate:
            self._jump = RateJump(step, before, rate)
        self._largest[group] = max(before, rate)

    def jump(self, step: int) -> RateJump | None:
        """Return the last jump, if it came in the 50 updates up to ``step``."""
        recent = self._jump is not None and step - self._jump.step <= WITHIN
        return self._jump if recent else None

    def state_dict(self) -> dict[str, Any]:
        """Return the largest rates and the last jump, in JSON's types."""
        jump = None if self._jump is None else asdict(self._jump)
        return {"largest": dict(self._largest), "rows": self._rows, "step": self._step, "jump": jump}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._largest, self._rows, self._step = dict(state["largest"]), state["rows"], state["step"]
        self._jump = state["jump"] and RateJump(**state["jump"])


def _is_rate(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
