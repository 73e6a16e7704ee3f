"""Rules: a score of a row's signals and the threshold above which it is an alarm, with its measured error rates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from ..errors import UsageError
from .row_signals import Reading
from .signal import names, signal_of

FITTED = "fitted.json"
DEFAULT, LOUD = "default", "loud"  # the sets of rules that come with the package
BOUND = 20.0  # the largest absolute value of a compressed signal


def compressed(signal: str, value: float) -> float:
    """Return the term of a signal in a rule's score, between -20 and 20.

    A z gives ln(1 + z) if it is positive, else 0. A level gives its logarithm; headroom's has the other sign, so that
    larger is always nearer to failure. A drift is unchanged. NaN gives 0.
    """
    kind = signal.rsplit(".", 1)[-1]
    if math.isnan(value):
        return 0.0
    if kind == "z":
        found = math.log1p(max(value, 0.0))
    elif kind == "level":
        found = math.log(max(value, 1e-12)) * (-1 if signal_of(signal).smallest else 1)
    else:
        found = value
    return min(max(found, -BOUND), BOUND)


@dataclass(frozen=True)
class ErrorRates:
    """The errors of a rule on runs that it was not fitted on, counted by run, each with its 95 % interval as (value,
    low, high).

    ``accused``: the share of the ``healthy`` runs that have an alarm; ``announced``: the share of the ``events`` that
    have an alarm in the 200 rows before they are full-blown; ``lead``: the median number of rows from the first of
    these alarms to the event (None: no event was announced); ``corpus``: the runs.
    """

    accused: tuple[float, float, float]
    healthy: int
    announced: tuple[float, float, float]
    events: int
    lead: tuple[float, float, float] | None
    corpus: str

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ErrorRates:
        accused, announced = (tuple(map(float, told[name])) for name in ("accused", "announced"))
        lead = tuple(map(float, told["lead"])) if told["lead"] else None
        healthy, events, corpus = int(told["healthy"]), int(told["events"]), str(told["corpus"])
        return cls(accused, healthy, announced, events, lead, corpus)  # pyright: ignore[reportArgumentType]

    @property
    def sentence(self) -> str:
        """Return both rates in words: how many healthy runs it accused, and the share of events as an interval."""
        _, low, high = self.announced
        return (
            f"the rule accused {round(self.accused[0] * self.healthy)} of {self.healthy} healthy runs, and announced "
            f"{100 * low:.0f} to {100 * high:.0f} % of {self.events} events (95 %; {self.corpus})"
        )


@dataclass(frozen=True)
class AlarmRule:
    """The rule score = sum_i w_i (max(c(s_i), l_i) - m_i), c being :func:`compressed`; it is an alarm if the score
    reaches ``threshold``.

    ``weights`` w, ``centres`` m (0 if not given) and ``lowest`` l (no bound if not given): by signal; a signal that a
    row lacks adds nothing. Raises UsageError for a signal that does not exist. ``measured``: None if its error rates
    were not measured.
    """

    name: str
    weights: Mapping[str, float]
    threshold: float
    title: str = ""
    centres: Mapping[str, float] = field(default_factory=dict)
    measured: ErrorRates | None = None
    lowest: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = (*self.weights, *self.centres, *self.lowest)
        if unknown := [name for name in given if name not in names()]:
            raise UsageError(f"no signal {unknown[0]!r}; there are {', '.join(names())}.")

    def score(self, signals: Mapping[str, Reading]) -> tuple[float, str]:
        """Return the score, and the signal that adds most to it; NaN and "" if the row has none of the signals."""
        parts = {
            name: weight * (self._held(name, signals[name].value) - self.centres.get(name, 0.0))
            for name, weight in self.weights.items()
            if name in signals
        }
        if not parts:
            return math.nan, ""
        return sum(parts.values()), max(parts, key=parts.__getitem__)

    def _held(self, name: str, value: float) -> float:
        return max(compressed(name, value), self.lowest.get(name, -BOUND))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> AlarmRule:
        """Read a rule from ``as_dict`` or from the fitted file."""
        kept = {
            name: told[name] for name in ("name", "weights", "threshold", "title", "centres", "lowest") if name in told
        }
        measured = told.get("measured")
        return cls(**kept, measured=ErrorRates.of(measured) if measured else None)


@dataclass(frozen=True)
class RuleSet:
    """The rules of an alarm. ``fitted``: the digest of the rules that were frozen before their error rates were
    measured; "": these were not measured. ``name``: the name of a set that comes with the package."""

    rules: tuple[AlarmRule, ...] = ()
    fitted: str = ""
    name: str = ""


def fitted(name: str | None = None) -> RuleSet:
    """Return the rules that come with the package, each with the error rates that results/alarm/second measured.

    ``name``: ``default`` (None too) or ``loud``; docs/alarm.md has both. Raises UsageError for
    another name.
    """
    told = json.loads(files("stabilitylab.alarm").joinpath(FITTED).read_text())
    sets = told["sets"]
    name = str(name or DEFAULT)
    if name not in sets:
        raise UsageError(
            f"no rules {name!r}; there are {' and '.join(sets)}, and files of `stabilitylab alarm --calibrate`, whose "
            "names end in .json."
        )
    return RuleSet(tuple(map(AlarmRule.of, sets[name])), told["corpus"], name)
