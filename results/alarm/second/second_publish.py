#!/usr/bin/env python
"""Writes the rules that come with the package, by what the tables say; the protocol fixed which.

    python results/alarm/second/second_publish.py     # stabilitylab/alarm/fitted.json

``default`` is the combination at its default threshold if goal 1 was reached (``ALARM``), and no
rule otherwise: a number that is not finite is an alarm in either case. ``loud`` is the combination at .2. A fall of the
loss counts at most as much as in healthy runs of the choosing half (``HELD``); this was added after the look. Each set
comes with the error rates of its alarm alone, as it is in the package, on the test half.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

from corpus import FIRST
from rivals import Rival, features
from second_corpus import FROZEN, HERE, SecondRun, lines, read
from second_freeze import digest, load
from second_rules import COMBINATION, UNION, well
from second_score import ALARM, LOUD, Look, scored

from stabilitylab.alarm import AlarmRule, ErrorRates
from stabilitylab.alarm.rules import DEFAULT, FITTED
from stabilitylab.alarm.rules import LOUD as LOUD_SET

PACKAGE = HERE.parents[2] / "stabilitylab" / "alarm"
TITLE = "layers' numbers leave their past together"
CORPUS = "small Transformers, results/alarm/second"
HELD = "loss.drift"  # has a negative weight, so that a loss that falls fast would be an alarm


def reached(folder: Path = HERE) -> bool:
    """Return True if every part of goal 1 was reached."""
    told = {line["goal"]: line["reached"] for line in lines(folder, "verdict.csv")}
    return all(told[goal] == "1" for goal in ALARM)


def lowest(folder: Path = HERE) -> dict[str, float]:
    """Return the lowest value of ``HELD`` in healthy runs of the choosing half."""
    found = [features(run, (HELD,))[FIRST:] for run in well(read(("choose",), folder))]
    return {HELD: float(np.nanmin(np.concatenate(found)))}


def published(test: Sequence[SecondRun], folder: Path = HERE) -> dict[str, list[AlarmRule]]:
    """Return the rules of each set by its name, with the error rates of their alarms on these runs."""
    (frozen, own), held = load(folder), lowest(folder)
    told = scored(test, Rival(COMBINATION, "combination", own.score(held)))
    centres = {name: own.centres[name] for name in own.weights}
    sets: dict[str, list[AlarmRule]] = {DEFAULT: [], LOUD_SET: []}
    for name, at in ((DEFAULT, UNION), (LOUD_SET, LOUD)):
        if name == LOUD_SET or reached(folder):
            limit = frozen["thresholds"][COMBINATION][
                at
            ]  # an alarm is a score above it; of the package, one that reaches
            above = math.nextafter(limit, math.inf)
            rates = rates_of(Look(test, told, limit).line())
            sets[name].append(AlarmRule(COMBINATION, own.weights, above, TITLE, centres, rates, held))
    return sets


def rates_of(line: Mapping[str, Any]) -> ErrorRates:
    """Return the error rates that a line of alarms.csv has."""

    def ends(name: str) -> tuple[float, float, float]:
        low, middle, high = (float(line[f"{name}{end}"]) for end in ("_low", "", "_high"))
        return middle, low, high

    lead = None if np.isnan(ends("lead")[0]) else ends("lead")
    healthy, events = int(line["healthy_accused_of"]), int(line["announced_of"])
    return ErrorRates(ends("healthy_accused"), healthy, ends("announced"), events, lead, CORPUS)


def main(folder: Path = HERE, package: Path = PACKAGE) -> None:
    sets = published(read(("test",), folder), folder)
    told = {name: [rule.as_dict() for rule in rules] for name, rules in sets.items()}
    content = {"corpus": digest(folder / FROZEN), "sets": told}
    (package / FITTED).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
