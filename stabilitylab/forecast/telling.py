"""The forecast of one model at one rate: P(fails) and the critical rates, or the reasons why there is no forecast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fitting import Fitted, features
from .known import Known, KnownEdges
from .measuring import Measured, both

NOTHING = "nothing is fitted yet: no measured numbers turn into a forecast"


@dataclass(frozen=True)
class Between:
    """A number and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """A forecast. ``fails``: P(stuck or diverged) at ``lr`` and ``warmup``; None without a forecast, for the reasons in
    ``why_not``. ``critical``: "warm-up 40" or "no warm-up" -> the rate at which P = 1/2, where covered. ``known``: with
    the same keys, the measured critical rate of runs of this very design; it takes precedence over the forecast.
    ``elsewhere``: the measured one on another text, ``text``; it is printed and decides nothing."""

    name: str
    lr: float
    warmup: int
    fails: Between | None
    critical: Mapping[str, Between]
    why_not: Sequence[str]
    measured: Measured
    version: str
    known: Mapping[str, Known] = field(default_factory=dict)
    elsewhere: Mapping[str, Known] = field(default_factory=dict)
    text: str = ""

    @property
    def rate(self) -> Between | None:
        """Return the critical rate with the requested warm-up."""
        return self.critical.get(warm_name(self.warmup))

    @property
    def seen(self) -> Known | None:
        """Return the known critical rate with the requested warm-up."""
        return self.known.get(warm_name(self.warmup))

    @property
    def word(self) -> str:
        if self.seen is not None:
            return self.seen.word(self.lr)
        if self.fails is None:
            return "cannot tell"
        if self.fails.low <= 0.5 <= self.fails.high:
            return "near the edge"
        return "fails" if self.fails.value > 0.5 else "trains"

    @property
    def risk(self) -> float:
        """Return P(fails): 0, 1/2 or 1 by a known critical rate, else the forecast; NaN without either."""
        if self.seen is not None:
            return {"trains": 0.0, "near the edge": 0.5, "fails": 1.0}[self.word]
        return math.nan if self.fails is None else self.fails.value

    def as_dict(self) -> dict[str, Any]:
        own = self.measured
        return {
            "name": self.name,
            "lr": self.lr,
            "warmup": self.warmup,
            "forecast": self.word,
            "known": {name: one.as_dict() for name, one in self.known.items()},
            "known_on_another_text": {name: one.as_dict() for name, one in self.elsewhere.items()},
            "p_fails": None if self.fails is None else vars(self.fails),
            "critical_rate": {name: vars(one) for name, one in self.critical.items()},
            "why_not": list(self.why_not),
            "evidence": list(own.evidence),
            "predictors": dict(own.numbers),
            "trials": {warm_name(updates): [vars(one) for one in tried.each] for updates, tried in own.trials.items()},
            "facts": dict(own.facts),
            "update_seconds": own.update_seconds,
            "minutes": own.seconds / 60,
            "cpu_minutes": own.cpu_seconds / 60,
            "fitted": self.version,
        }


def warm_name(warmup: int) -> str:
    return f"warm-up {warmup}" if warmup else "no warm-up"


def forecast(
    measured: Measured, lr: float, warmup: int, fit: Fitted | None, edges: KnownEdges | None = None
) -> Forecast:
    """Forecast by the known critical rates and by the stored fit, with warm-up and without. If no warm-up was
    requested, "with" means 40 updates."""
    found = {updates: edges.of(measured.facts, updates) for updates in both(warmup)} if edges else {}
    seen = {warm_name(updates): one for updates, one in found.items() if one is not None}
    same = edges is not None and edges.same_text(measured.facts)
    told = {"known": seen if same else {}, "elsewhere": {} if same else seen, "text": edges.text if edges else ""}
    if fit is None:
        return Forecast(measured.name, lr, warmup, None, {}, (NOTHING,), measured, "", **told)
    critical, fails, why = {}, None, []
    for updates in both(warmup):
        x = features(measured.numbers, int(measured.facts.get("layers") or 0), updates)
        misses = fit.cover.misses(measured.facts, x, updates)
        if updates == warmup:
            why = misses
        if misses:
            continue
        edge, spread = fit.line.edge(x), fit.spread
        critical[warm_name(updates)] = Between(10**edge, 10 ** (edge - spread), 10 ** (edge + spread))
        if updates == warmup:
            at = math.log10(lr)
            fails = Between(*(fit.line.probability(edge + shift, at) for shift in (0.0, spread, -spread)))
    return Forecast(measured.name, lr, warmup, fails, critical, tuple(why), measured, fit.version, **told)
