"""The change of the best learning rate with the width of a model: an exponent with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from .result import Bracket, RateAnswer
from .search import STEP
from .subject import RateSubject
from .trials import Budget

FURTHER = 4  # times the largest width, at which the range of the exponent is put into a factor


@dataclass(frozen=True)
class ScaledRates:
    """The answers of searches at several widths, and the exponent of the best rate: rate = c * width^exponent.

    The interval of the exponent contains every least-squares slope that is possible if each best rate lies anywhere in
    its own interval. Half its width is sum_i |w_i| h_i, where w_i are the weights of the slope and h_i is half the
    width of an interval in log(rate). ``exponent`` is None if fewer than two widths have a best rate.
    """

    answers: Mapping[int, RateAnswer]
    exponent: Bracket | None
    stopped: str = ""
    signal: int | None = None  # that ended the search

    @property
    def moves(self) -> bool | None:
        """True if the best rate certainly depends on the width. False if a constant rate lies in the interval. None if
        no exponent is known."""
        if self.exponent is None or self.exponent.low is None or self.exponent.high is None:
            return None
        return not self.exponent.low <= 0 <= self.exponent.high

    @property
    def outcome(self) -> str:
        return "found" if self.exponent is not None else "too early"

    def at(self, width: int) -> Bracket | None:
        """Return the best rate for another width, extrapolated from the largest width, with the interval of the
        exponent."""
        if self.exponent is None or self.exponent.low is None or self.exponent.high is None:
            return None
        largest = max(width for width, one in self.answers.items() if one.best is not None)
        best = self.answers[largest].best
        assert best is not None
        factor = math.log(width / largest)
        ends = [best.value * math.exp(factor * slope) for slope in (self.exponent.low, self.exponent.high)]
        return Bracket(best.value * math.exp(factor * self.exponent.value), min(ends), max(ends))

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": {str(width): one.as_dict() for width, one in self.answers.items()},
            "exponent": None if self.exponent is None else vars(self.exponent),
            "moves": self.moves,
            "stopped": self.stopped,
        }

    def sentences(self) -> list[str]:
        lines = []
        for width, one in self.answers.items():
            best = "no best rate" if one.best is None else f"best rate {one.best}"
            safe = "" if one.safe is None else f", largest safe rate {one.safe}"
            lines.append(f"width {width}: {best}{safe} (after {one.updates:,} updates)")
        if self.exponent is None:
            lines.append("Fewer than two widths have a best rate, so that nothing can be said about its change.")
        elif self.moves:
            lines.append(
                f"The best rate moves with the width: exponent {self._exponent}. Carry it to another width by this "
                "power, or change the parametrization (muP) so that it stays."
            )
        else:
            ends = [FURTHER ** abs(end) for end in (self.exponent.low, self.exponent.high) if end is not None]
            lines.append(
                f"{len(self.answers)} widths do not show that the best rate moves with the width: exponent "
                f"{self._exponent}. Carried to {FURTHER} times the largest width, it may be off by a factor of "
                f"{max(ends):.2g}."
            )
        return [*lines, *([self.stopped] if self.stopped else [])]

    @property
    def _exponent(self) -> str:
        assert self.exponent is not None
        return f"{self.exponent.value:+.2f} ({self.exponent.low:+.2f} to {self.exponent.high:+.2f})"

    def __str__(self) -> str:
        return "\n".join(self.sentences())


def scaled(
    widths: Sequence[int],
    subject_of: Callable[[int], RateSubject],
    search: Callable[[int, RateSubject, Path, Budget], RateAnswer],
    out: Path,
    budget: Budget,
) -> ScaledRates:
    """Search the rate of every width, each in a folder of its own. The remaining widths share the remaining budget."""
    widths = check_widths(widths)
    answers: dict[int, RateAnswer] = {}
    for number, width in enumerate(widths):
        left = len(widths) - number
        own = Budget(
            None if budget.updates is None else (budget.updates - budget.spent) // left,
            None if budget.minutes is None else max(0.01, budget.minutes_left / left),
        )
        answers[width] = search(width, subject_of(width), out / f"width-{width}", own)
        budget.spent += own.spent
        if answers[width].signal is not None:
            break
    stopped = next((one.stopped for one in answers.values() if one.stopped), "")
    signal = next((one.signal for one in answers.values() if one.signal is not None), None)
    return ScaledRates(answers, exponent(answers), stopped, signal)


def check_widths(widths: Sequence[int]) -> list[int]:
    """Return the widths in ascending order. Raises UsageError for fewer than two widths, or for values that are not
    widths."""
    if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths):
        raise UsageError(f"widths = {list(widths)} must be whole numbers above 0, such as 64,128,256.")
    if len(set(widths)) < 2:
        raise UsageError("one width shows no change: give two or more, such as 64,128,256.")
    return sorted(set(widths))


def exponent(answers: Mapping[int, RateAnswer]) -> Bracket | None:
    """Return the exponent of the best rate in the width. An open end of an interval counts as one step of the grid."""
    found = [(width, one.best) for width, one in answers.items() if one.best is not None]
    if len(found) < 2:
        return None
    x = np.log([width for width, _ in found])
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    low = np.log([best.low if best.low is not None else best.value / STEP for _, best in found])
    high = np.log([best.high if best.high is not None else best.value * STEP for _, best in found])
    value = float(weights @ np.log([best.value for _, best in found]))
    ends = [float(np.where(weights > 0, one, other) @ weights) for one, other in ((low, high), (high, low))]
    return Bracket(value, *ends)
