"""The calibration of an alarm: the largest score of each healthy run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from .._version import __version__
from ..errors import UsageError, listed
from ..store import Run
from ..store.layout import METRICS
from .alarm import not_finite
from .calibration import CalibratedRule, Calibration, HealthyRun, first_of, thresholds
from .healthy import named, refuse_ill, refuse_other_lengths, refuse_other_tables
from .past import LEAST
from .reading import rows
from .recipe import differences, recipe_of
from .row_signals import Signals
from .rules import LOUD, AlarmRule, RuleSet, fitted
from .signal import signal_of


def calibrate(runs: Sequence[Run | str | Path], rules: RuleSet | str = LOUD) -> Calibration:
    """Return an alarm's thresholds from healthy runs of one recipe and one length (:class:`Calibration` has the formula
    and the bound: with k runs, at most 1 in k + 1 new healthy runs of the recipe has a false alarm).

    ``rules``: the rules whose scores are calibrated, or the name of a set of :func:`~stabilitylab.alarm.fitted`. The
    bound holds for rules that were not made or chosen by a look at these runs.
    Signals whose table or metric the runs do not have are left out, and rules without a signal too
    (``Calibration.left_out``). Settings in which the runs differ are in ``Calibration.differing``.

    Raises UsageError, which names the run, for no run, for a run that is given twice or copied, that did not end as
    healthy runs end, or that differs in its length, its rows or its tables; and if no rule can be calibrated. Raises
    InputError for a run that cannot be read.
    """
    opened = named([run if isinstance(run, Run) else Run.open(run) for run in runs])
    frozen = {name: run.snapshot() for name, run in opened.items()}
    refuse_ill(frozen)
    steps = refuse_other_lengths(frozen)
    tables = refuse_other_tables(frozen)
    known = fitted(rules) if isinstance(rules, str) else rules
    if not known.rules:
        raise UsageError(f"the rules {known.name!r} hold none that could be calibrated: take --rules {LOUD}.")
    metrics = set[str].intersection(*({*run.arrow(METRICS).column_names} for run in frozen.values()))
    used, left_out = available(known.rules, {*tables}, metrics)
    if not used:
        lacking = listed(sorted({*left_out.values()}), 8)
        raise UsageError(
            f"the runs have no number that these rules read ({lacking}): record them, or take other --rules."
        )
    scored = {name: _scored(name, run, used) for name, run in frozen.items()}
    _refuse_copies(scored)
    silent = [rule.name for rule in used if all(run.largest(rule.name) is None for run in scored.values())]
    left_out.update(dict.fromkeys(silent, "a number in any row"))
    used = tuple(rule for rule in used if rule.name not in silent)
    largest = {name: {rule.name: run.largest(rule.name) for rule in used} for name, run in scored.items()}
    for name, found in largest.items():
        if all(value is None for value in found.values()):
            raise UsageError(
                f"{name} has no number that these rules read after its first {LEAST} rows, which have no past: "
                "calibrate with longer runs, or take other --rules."
            )
    calibrated = thresholds({rule.name: rule.threshold for rule in used}, [*largest.values()])
    recipes = {name: recipe_of(run.manifest) for name, run in frozen.items()}
    differing = differences(recipes)
    common = next(iter(recipes.values()))
    try:
        return Calibration(
            stabilitylab=__version__,
            rule_set=known.name,
            runs=tuple(
                HealthyRun(name=name, run_id=frozen[name].identity.run_id, scores=largest[name]) for name in frozen
            ),
            rules=tuple(
                CalibratedRule(
                    name=rule.name,
                    title=rule.title,
                    weights={**rule.weights},
                    centres={**rule.centres},
                    lowest={**rule.lowest},
                    own_threshold=rule.threshold,
                    threshold=calibrated[rule.name],
                )
                for rule in used
            ),
            left_out=left_out,
            steps=steps,
            tables=tables,
            recipe={key: value for key, value in common.items() if key not in differing},
            differing=differing,
        )
    except ValidationError as error:  # rules of the caller's own may have any name and number
        raise UsageError(f"these rules cannot be calibrated ({first_of(error)}).") from error


def available(
    rules: Iterable[AlarmRule], tables: set[str], metrics: set[str]
) -> tuple[tuple[AlarmRule, ...], dict[str, str]]:
    """Return the rules without the signals that runs of these tables and metrics do not have, and what was left out:
    signal or rule -> what it lacks."""
    used, left_out = [], {}
    for rule in rules:
        lacking = {}
        for reading in rule.weights:
            signal = signal_of(reading)
            if (signal.table or signal.column) not in (tables if signal.table else metrics):
                lacking[reading] = signal.table or signal.column
        left_out.update(lacking)
        kept = {signal: weight for signal, weight in rule.weights.items() if signal not in lacking}
        if kept:
            centres = {signal: centre for signal, centre in rule.centres.items() if signal in kept}
            lowest = {signal: bound for signal, bound in rule.lowest.items() if signal in kept}
            used.append(replace(rule, weights=kept, centres=centres, lowest=lowest, measured=None))
        else:
            left_out[rule.name] = listed(sorted({*lacking.values()}), 8)
    return tuple(used), left_out


@dataclass(frozen=True)
class Scored:
    """The scores of a run by rule: ``series``, one a row (NaN: no number), from the first row on that has a past."""

    series: Mapping[str, np.ndarray]

    def largest(self, rule: str) -> float | None:
        """Return the largest score of a rule; None if it had no number."""
        found = self.series[rule][~np.isnan(self.series[rule])]
        return float(found.max()) if len(found) else None

    def repeats(self, other: Scored) -> bool:
        """True if each row has the scores of the same row of ``other``, and they are not all one number."""
        same = all(np.array_equal(own, other.series[name], equal_nan=True) for name, own in self.series.items())
        return same and any(len(np.unique(own[~np.isnan(own)])) > 1 for own in self.series.values())


def _scored(name: str, run: Run, rules: Sequence[AlarmRule]) -> Scored:
    signals, series = Signals(), {rule.name: list[float]() for rule in rules}
    signals.open([run.table(table) for table in run.tables])
    for number, (step, metrics, tables) in enumerate(rows(run), 1):
        if broken := not_finite(step, metrics):
            raise UsageError(
                f"{name} met a number that is not finite ({broken[0].title} at step {step}): calibrate with healthy "
                "runs."
            )
        told = signals.read(metrics, tables)
        if number > LEAST:
            for rule in rules:
                series[rule.name].append(rule.score(told)[0])
    return Scored({rule: np.array(own) for rule, own in series.items()})


def _refuse_copies(scored: Mapping[str, Scored]) -> None:
    names = list(scored)
    for number, name in enumerate(names):
        for other in names[:number]:
            if scored[name].repeats(scored[other]):
                raise UsageError(f"{name} repeats {other} row by row: calibrate with runs of different seeds.")
