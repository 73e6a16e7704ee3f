#!/usr/bin/env python
"""Writes the rules that come with the package, by what the tables say; the protocol fixed which.

    python results/alarm/publish.py     # stabilitylab/alarm/fitted.json, published.csv

An alarm has the combination at .5 false alarms per 1,000 rows where the goal is reached without each family and without
each architecture (verdict.csv); else the three conservative rules as they are. Who asks for the other set gets it too.
Either comes with its error rates on the test half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from combine import Fit
from corpus import HERE, CorpusRun, lines, read
from events import false_rate, interval, median_lead, outcomes, recall
from freeze import COMBINATION, RATES, digest, load, scored
from score import Line, statistics
from score import write as write_table

from stabilitylab.alarm import AlarmRule, ErrorRates
from stabilitylab.alarm.rules import FITTED, RuleSet

PACKAGE = HERE.parents[1] / "stabilitylab" / "alarm"
TITLE = "layers' numbers leave their past together"
# A loss, a gradient norm or an update that has not been so far from its past: thresholds by hand, before any run of the
# corpus was made. The third stands there since the two others had nothing to say of examples/learning_rate_jump.py, in
# which the loss had been falling fast, so that a doubling of it is not far.
CONSERVATIVE = "conservative"
BY_HAND = (
    AlarmRule("loss", {"loss.z": 1.0}, math.log1p(12.0), "the loss leaves its past"),
    AlarmRule("gradients", {"grad_norm.z": 1.0}, math.log1p(30.0), "a gradient norm leaves its past"),
    AlarmRule("updates", {"update.z": 1.0}, math.log1p(30.0), "an update leaves its past"),
)


def reached(folder: Path = HERE) -> bool:
    """Whether the goal was reached both ways."""
    return all(line["reached"] == "1" for line in lines(folder, "verdict.csv"))


def over(rule: AlarmRule, runs: Sequence[CorpusRun]) -> list[np.ndarray]:
    """By how much the rule's score is over its threshold, row by row."""
    score = Fit(dict(rule.weights), {name: rule.centres.get(name, 0.0) for name in rule.weights}, 0.0).score()
    return [own - rule.threshold for own in scored(runs, score)]


def measured(rule: AlarmRule, runs: Sequence[CorpusRun]) -> AlarmRule:
    """The rule with its error rates on these runs."""
    found = outcomes(runs, over(rule, runs), 0.0)
    rate, share, lead = (interval(found, own) for own in (false_rate(found), recall(found), median_lead(found)))
    told = None if math.isnan(lead[0]) else lead
    return replace(rule, measured=ErrorRates(rate, share, told, len(runs), "runs of small Transformers, results/alarm"))


def rates(sets: Mapping[str, RuleSet], runs: Sequence[CorpusRun]) -> Iterator[Line]:
    """What each rule does, and each set as a whole (within 50 rows of a rule that spoke, another adds nothing)."""
    for title, rules in sets.items():
        scores = {rule.name: over(rule, runs) for rule in rules.rules}
        if len(scores) > 1:
            scores["any of them"] = [np.maximum.reduce(own) for own in zip(*scores.values(), strict=True)]
        for name, own in scores.items():
            found = outcomes(runs, own, 0.0)
            struck = [one.delay is not None for one in found if one.run.outcome == "fault"]
            line = {"rules": title, "rule": name, **statistics(found)}
            yield {**line, "faults": len(struck), "faults_announced": sum(struck)}


def published(test: Sequence[CorpusRun], folder: Path = HERE) -> dict[str, RuleSet]:
    """By name, the set that an alarm has unless told otherwise first."""
    frozen, own = load(folder)
    at = frozen["rules"][COMBINATION]["thresholds"][str(RATES[0])]
    centres = {name: own.centres[name] for name in own.weights}
    combination = AlarmRule(COMBINATION, own.weights, at, TITLE, centres)
    sets = {CONSERVATIVE: BY_HAND, COMBINATION: (combination,)}
    made = digest(folder / "frozen.json")
    found = {name: RuleSet(tuple(measured(rule, test) for rule in rules), made) for name, rules in sets.items()}
    first = COMBINATION if reached(folder) else CONSERVATIVE
    return {first: found.pop(first), **found}


def write(sets: Mapping[str, RuleSet], path: Path) -> None:
    first = next(iter(sets))
    rules = {name: [rule.as_dict() for rule in own.rules] for name, own in sets.items()}
    path.write_text(json.dumps({"corpus": sets[first].fitted, "default": first, "sets": rules}, indent=1) + "\n")


def main(test: Sequence[CorpusRun], folder: Path = HERE, package: Path = PACKAGE) -> None:
    sets = published(test, folder)
    write(sets, package / FITTED)
    write_table(folder / "published.csv", rates(sets, test))


if __name__ == "__main__":
    main(read("test"))
