"""The alarm: it reads rows and returns alerts. It keeps its state over a resume, and a rule is silent for a while after
an alert."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..schema import Cells, Row, Table
from .calibration import SUFFIX, Calibration
from .past import LEAST
from .rates import RateJump, Rates
from .row_signals import Reading, Signals
from .rules import AlarmRule, ErrorRates, RuleSet, fitted
from .signal import signal_of

log = logging.getLogger("stabilitylab.alarm")

REFRACTORY = 50  # rows after an alert in which its rule is silent
NOT_FINITE = "not finite"
ADVICE = {
    "update": "lower the learning rate, or clip the update",
    "rms_t": "the second moment lags: lower beta_2, or clip the update",
    "update_rms": "lower the learning rate",
    "heads": "attention logits grow: use QK-norm, or a lower rate for queries and keys",
    "log_z": "the output's logits grow: add a z-loss, or weight decay on the output",
    "ln_input": "the residual stream grows: lower the learning rate, or add weight decay",
    "residual": "the residual stream grows: lower the learning rate, or add weight decay",
    "headroom": "the learning rate is above the edge of stability: lower it, or add warm-up steps",
    "to_edge": "the learning rate is above the edge of stability: lower it, or add warm-up steps",
}
USUAL = (
    "look at the batch first; then go back to a checkpoint, and lower the learning rate, clip gradients, "
    "or skip the batch"
)


@dataclass(frozen=True)
class Alert:
    """One alarm: what was seen, where, since when, and how sure it is.

    ``since``: the first row of the unbroken series of rows whose score was above half the threshold. ``signal``: the
    signal that added most to the score, with its ``value`` and its ``place``. ``measured``: the rule's error rates,
    None if they were not measured; ``lacking``: tables that were part of that measurement and that this run lacks.
    ``sure``: for a calibrated alarm its bound on false alarms in words, or why there is none; "" for other alarms.
    ``bound``: that bound, the largest probability of an alarm in a healthy run; None if there is none. ``rate_jump``:
    the jump of the learning rate in the 50 updates before; the advice is then about the schedule. None without one.
    """

    step: int
    rule: str
    title: str
    score: float
    threshold: float
    since: int
    signal: str
    value: float
    place: Row | None
    advice: str
    measured: ErrorRates | None = None
    lacking: tuple[str, ...] = ()
    sure: str = ""
    bound: float | None = None
    rate_jump: RateJump | None = None

    @property
    def where(self) -> str:
        """Return the place in words: ``h.2.mlp (layer 3 of h, ffn)``; "" for a number of the whole model."""
        if (place := self.place) is None:
            return ""
        layer = f"layer {place.layer} of {place.stack}" if place.layer and place.stack else ""
        part = "" if place.site.endswith(place.sublayer) else place.sublayer
        inside = ", ".join(filter(None, (layer, part)))
        return f"{place.site} ({inside})" if place.site and inside else place.site or inside or place.stack

    @property
    def sentence(self) -> str:
        """Return the alert in one line: what, since when, where, what to do, and how sure."""
        where = f" at {self.where}" if self.where else ""
        jumped = "" if self.rate_jump is None else f" {self.rate_jump.sentence}"
        if self.rule == NOT_FINITE:
            return f"step {self.step}: {self.title}{where}.{jumped} {self.advice[0].upper()}{self.advice[1:]}."
        since = f" since step {self.since}" if self.since < self.step else ""
        quantity = signal_of(self.signal).title
        return (
            f"step {self.step}: {self.title}{since}.{jumped} Most of all {quantity}{where} ({self.signal} "
            f"{self.value:.3g}; score {self.score:.3g}, threshold {self.threshold:.3g}). To do: {self.advice}. How "
            f"sure: {self._sure}."
        )

    @property
    def _sure(self) -> str:
        if self.sure or self.measured is None:
            return self.sure or "its rate of false alarms is not known"
        more = f", measured with {', '.join(self.lacking)} too, which this run did not record" if self.lacking else ""
        return self.measured.sentence + more

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence}


def not_finite(step: int, metrics: Mapping[str, float | None]) -> list[Alert]:
    """Return the alert for a loss or a total gradient norm that is not finite; [] without one."""
    for name in ("loss", "nll", "grad_norm_total"):
        value = metrics.get(name)
        if value is not None and not math.isfinite(value):
            title = f"{name} is {value}"
            advice = "run stabilitylab diagnose, which says where the number came from, and go back to a checkpoint"
            return [Alert(step, NOT_FINITE, title, math.inf, math.inf, step, name, value, None, advice)]
    return []


class Alarm:
    """Reads rows as they come and reports the rows that announce a failure.

    ``rules``: your own rules, the name of a set of :func:`~stabilitylab.alarm.fitted` (default: its default set), or
    thresholds from your own healthy runs: a :class:`~stabilitylab.alarm.Calibration` or the path of its file, which
    ends in ``.json``. ``mute``: names of silent rules. ``on_alarm`` is called with each :class:`Alert`; its errors are
    logged and never end a training.

    A number that is not finite is always an alarm. Other alarms are not raised in the first 20 rows, which have no past
    to compare them with. The alarm reads only numbers that the row holds anyway; error rates hold for rows of every
    update (``every=1``). Raises UsageError for a muted rule that does not exist, and InputError for a file that cannot
    be read.

    A calibrated alarm reads whole rows, as the calibrated runs were read, so it speaks after the optimizer's step. From
    the first row on that is not like a row of the calibrated runs (``outside`` says why: a longer run, rows of other
    steps, a table that is missing) the alarm says so once and goes on, and its alerts claim no bound.
    """

    def __init__(
        self,
        rules: RuleSet | Sequence[AlarmRule] | Calibration | str | Path | None = None,
        *,
        mute: Collection[str] = (),
        on_alarm: Callable[[Alert], object] | None = None,
        refractory: int = REFRACTORY,
    ) -> None:
        if isinstance(rules, Path) or (isinstance(rules, str) and Path(rules).suffix == SUFFIX):
            rules = Calibration.read(rules)
        self.calibration = rules if isinstance(rules, Calibration) else None
        self.outside = ""  # the reason why this run is not like the calibrated runs
        if isinstance(rules, Calibration):
            rules = rules.alarm_rules
        elif rules is None or isinstance(rules, str):
            rules = fitted(rules)
        known = rules if isinstance(rules, RuleSet) else RuleSet(tuple(rules))
        self.name = known.name
        self.rules, self.on_alarm, self.refractory = known.rules, on_alarm, refractory
        names = [*(rule.name for rule in self.rules), NOT_FINITE]
        if unknown := [name for name in mute if name not in names]:
            raise UsageError(f"no rule {unknown[0]!r} to mute; there are {', '.join(names)}.")
        self.muted = frozenset(mute)
        self.alerts: list[Alert] = []
        self._signals, self._rates = Signals(), Rates()
        self._early: list[AlarmRule] = []  # rules that need no number of the update
        self._lacking: dict[str, tuple[str, ...]] = {}  # rule -> tables that it reads and the run lacks
        self._begun: tuple[int, frozenset[str]] | None = None  # the row that is known in part
        self.rows = 0  # number of rows so far
        self._spoke: dict[str, int] = {}  # rule -> the number of the row at which it spoke last
        self._since: dict[str, int] = {}  # rule -> the step since which its score is above half its threshold

    def open(self, tables: Sequence[Table]) -> None:
        """Declare the tables of the rows to come."""
        self._signals.open(tables)
        late = {table.name for table in tables if table.phase == "update"}
        read = {rule.name: {signal_of(signal).table for signal in rule.weights} - {""} for rule in self.rules}
        self._early = [rule for rule in self.rules if not late & read[rule.name]]
        there = {table.name for table in tables}
        self._lacking = {name: tuple(sorted(own - there)) for name, own in read.items()}
        if self.calibration is not None:
            self._early = []  # a part of a row beside older numbers has a score that no calibrated run had
            self._leave(self.calibration.unlike_tables(tables))

    @property
    def lacking(self) -> tuple[str, ...]:
        """Return the tables that a rule which is not muted reads and the run lacks."""
        return tuple(sorted({table for name, own in self._lacking.items() if name not in self.muted for table in own}))

    def read_ledger(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Take facts of the run's ledger before the row at which they were found: a jump of the learning rate of a
        parameter group is named by the next alerts."""
        self._rates.read_ledger(facts)

    def begin(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> list[Alert]:
        """Return the alerts from the part of a row that is known before the optimizer's step; ``observe`` follows with
        the whole row. Rules that need a number of the update wait for ``observe``."""
        self.rows += 1
        self._rates.read(step, metrics)
        told = self._signals.read(metrics, tables)
        self._begun = step, frozenset((*metrics, *tables))
        return self._say(self._found(step, metrics, told, self._early))

    def observe(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> list[Alert]:
        """Return the alerts of this row; rows come in their order, once each."""
        begun, self._begun = self._begun, None
        more = begun is not None and begun[0] == step
        taken = begun[1] if begun is not None and more else frozenset[str]()
        self.rows += not more
        self._rates.read(step, metrics)
        if self.calibration is not None:
            self._leave(self.calibration.unlike_row(self.rows, step, tables))
        told = self._signals.read(
            {name: value for name, value in metrics.items() if name not in taken},
            {name: cells for name, cells in tables.items() if name not in taken},
            more=more,
        )
        return self._say(self._found(step, metrics, told, self.rules))

    def _found(
        self, step: int, metrics: Mapping[str, float | None], told: Mapping[str, Reading], rules: Sequence[AlarmRule]
    ) -> list[Alert]:
        jump = self._rates.jump(step)
        found = [replace(alert, rate_jump=jump) for alert in not_finite(step, metrics)]
        for rule in rules:
            found += self._by(rule, step, told, jump)
        return found

    def _leave(self, reason: str) -> None:
        """Drop the bound of a calibrated alarm for ``reason``, if there is one, and say so once."""
        if reason and not self.outside:
            self.outside = reason
            log.warning(
                "alarm: %s. The alarm goes on without a bound on false alarms: calibrate it with healthy runs of this "
                "length and these tables.",
                reason,
            )

    def _say(self, found: Sequence[Alert]) -> list[Alert]:
        spoken = [alert for alert in found if alert.rule not in self.muted and self._may(alert.rule)]
        for alert in spoken:
            self._spoke[alert.rule] = self.rows
            self.alerts.append(alert)
            self._tell(alert)
        return spoken

    def _by(self, rule: AlarmRule, step: int, told: Mapping[str, Reading], jump: RateJump | None) -> list[Alert]:
        score, signal = rule.score(told)
        if self.rows <= LEAST:
            return []
        if not score >= rule.threshold - abs(rule.threshold) / 2:
            self._since.pop(rule.name, None)
            return []
        since = self._since.setdefault(rule.name, step)
        if score < rule.threshold or (self.calibration is not None and score == rule.threshold):
            return []  # of k + 1 equal scores none is larger than the others
        own = told[signal]
        advice = ADVICE.get(signal.split(".")[0], USUAL) if jump is None else jump.advice
        sure, bound = self._promise()
        return [
            Alert(
                step=step,
                rule=rule.name,
                title=rule.title or rule.name,
                score=score,
                threshold=rule.threshold,
                since=since,
                signal=signal,
                value=own.value,
                place=own.place,
                advice=advice,
                measured=rule.measured,
                lacking=self._lacking.get(rule.name, ()),
                sure=sure,
                bound=bound,
                rate_jump=jump,
            )
        ]

    def _promise(self) -> tuple[str, float | None]:
        """Return the bound of a calibrated alarm in words and as a number."""
        if self.calibration is None:
            return "", None
        if self.outside:
            return f"no bound on false alarms: {self.outside}", None
        return self.calibration.sure, self.calibration.bound

    def _may(self, rule: str) -> bool:
        return rule not in self._spoke or self.rows - self._spoke[rule] >= self.refractory

    def _tell(self, alert: Alert) -> None:
        log.warning("alarm: %s", alert.sentence)
        if self.on_alarm is not None:
            try:
                self.on_alarm(alert)
            except Exception:
                log.exception("on_alarm failed at step %d; training goes on.", alert.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed alarm needs: the pasts, and the row at which each rule spoke last."""
        return {
            "rows": self.rows,
            "spoke": dict(self._spoke),
            "since": dict(self._since),
            "signals": self._signals.state_dict(),
            "rates": self._rates.state_dict(),
            "begun": self._begun and [self._begun[0], sorted(self._begun[1])],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows, self._spoke, self._since = state["rows"], dict(state["spoke"]), dict(state["since"])
        self._signals.load_state_dict(state["signals"])
        if "rates" in state:  # a checkpoint of an older version has none
            self._rates.load_state_dict(state["rates"])
        self._begun = state["begun"] and (state["begun"][0], frozenset(state["begun"][1]))
