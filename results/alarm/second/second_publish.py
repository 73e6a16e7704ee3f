#!/usr/bin/env python
"""Writes the rules that come with the package, by what the tables say; the protocol fixed which.

    python results/alarm/second/second_publish.py     # stabilitylab/alarm/fitted.json

``default`` is the combination at its default threshold if goal 1 was reached (the first three of ``ALARM``), and no
rule otherwise: a number that is not finite is an alarm in either case. ``loud`` is the combination at .2. Each comes
with the error rates of its alarm alone on the test half.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

from second_corpus import FROZEN, HERE, SecondRun, lines, read
from second_freeze import digest, load
from second_rules import COMBINATION, UNION, known
from second_score import LOUD, Look, scored

from stabilitylab.alarm import AlarmRule, ErrorRates
from stabilitylab.alarm.rules import DEFAULT, FITTED
from stabilitylab.alarm.rules import LOUD as LOUD_SET

PACKAGE = HERE.parents[2] / "stabilitylab" / "alarm"
TITLE = "layers' numbers leave their past together"
CORPUS = "small Transformers, results/alarm/second"
ALARM = ("half of the events announced", "median lead of 20 rows", "above rate over edge")


def reached(folder: Path = HERE) -> bool:
    """Return True if every part of goal 1 was reached."""
    told = {line["goal"]: line["reached"] for line in lines(folder, "verdict.csv")}
    return all(told[goal] == "1" for goal in ALARM)


def rule_of(frozen: Mapping[str, Any], at: str) -> AlarmRule:
    """Return the frozen combination as a rule of the package, which speaks at its threshold and not above it."""
    own = frozen["fit"]
    limit = math.nextafter(frozen["thresholds"][COMBINATION][at], math.inf)
    centres = {name: own["centres"][name] for name in own["weights"]}
    return AlarmRule(COMBINATION, own["weights"], limit, TITLE, centres)


def measured(rule: AlarmRule, frozen: Mapping[str, Any], at: str, test: Sequence[SecondRun], folder: Path) -> AlarmRule:
    """Return the rule with the error rates of its alarm on these runs."""
    _, fit = load(folder)
    look = Look(test, scored(test, known(fit)[COMBINATION]), frozen["thresholds"][COMBINATION][at])
    line = look.line()

    def ends(name: str) -> tuple[float, float, float]:
        low, middle, high = (float(line[f"{name}{end}"]) for end in ("_low", "", "_high"))
        return middle, low, high

    lead = None if np.isnan(ends("lead")[0]) else ends("lead")
    healthy, events = int(line["healthy_accused_of"]), int(line["announced_of"])
    rates = ErrorRates(ends("healthy_accused"), healthy, ends("announced"), events, lead, CORPUS)
    return replace(rule, measured=rates)


def published(test: Sequence[SecondRun], folder: Path = HERE) -> dict[str, list[AlarmRule]]:
    """Return the rules of each set by its name."""
    frozen, _ = load(folder)
    wanted = {DEFAULT: (UNION,) if reached(folder) else (), LOUD_SET: (LOUD,)}
    return {
        name: [measured(rule_of(frozen, at), frozen, at, test, folder) for at in limits]
        for name, limits in wanted.items()
    }


def main(folder: Path = HERE, package: Path = PACKAGE) -> None:
    sets = published(read(("test",), folder), folder)
    told = {name: [rule.as_dict() for rule in rules] for name, rules in sets.items()}
    content = {"corpus": digest(folder / FROZEN), "sets": told}
    (package / FITTED).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
