#!/usr/bin/env python
"""Every number that pages say of the second corpus, from the tables beside this file.

    python results/alarm/second/second_say.py [--write]

Blocks between ``<!-- second:NAME -->`` and ``<!-- end -->`` in these pages are what this script makes. Without
``--write`` it compares and ends with 1 where a digit differs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import page_blocks
from page_blocks import table
from second_corpus import HERE, lines
from second_rules import COMBINATION, CONTROLS, UNION
from second_score import LEAD, LOUD

ROOT = HERE.parents[2]
PAGES = tuple(ROOT / name for name in ("docs/alarm.md", "docs/detectors.md", "results/alarm/second/README.md"))
NAMES = {UNION: "default (.03, with diagnose)", LOUD: "loud (.2)", "0.03": "alone at .03"}
OTHERS = 6  # signals and rules of others that are shown, the best of them at the loud threshold
Line = Mapping[str, str]


class SecondCorpus:
    """The tables of one folder, as blocks of a page."""

    def __init__(self, folder: Path = HERE) -> None:
        self._folder = folder
        own = (
            self.made,
            self.goals,
            self.alarms,
            self.families,
            self.archs,
            self.sets,
            self.findings,
            self.causes,
            self.pairs,
        )
        self.blocks: page_blocks.Blocks = {one.__name__: one for one in own}

    def _lines(self, name: str, **where: str) -> list[dict[str, str]]:
        return [line for line in lines(self._folder, f"{name}.csv") if all(line[k] == v for k, v in where.items())]

    def made(self) -> list[str]:
        """How many runs became what, by kind."""
        labels = ("healthy", "slow", "event", "collapse", "both", "open")
        kinds = {"endogenous": "from within", "exogenous": "from outside", "healthy": "healthy, plain and hard"}
        counts: dict[tuple[str, str], dict[str, int]] = {}
        for line in self._lines("made"):
            own = counts.setdefault((line["half"], line["kind"]), dict.fromkeys(labels, 0))
            own[line["label"]] = own.get(line["label"], 0) + int(line["runs"])
        rows = [
            (half, kinds.get(kind, kind), sum(own.values()), *(own[label] for label in labels))
            for (half, kind), own in sorted(counts.items())
        ]
        columns = ("half", "what was done", "runs", "healthy", "too fast", "event", "collapse", "both", "undecided")
        return table(columns, rows)

    def goals(self) -> list[str]:
        """Each goal, what was measured, and whether it was reached."""
        told = {"1": "reached", "0": "missed", "": "not judged"}
        rows = [(line["goal"], line["measured"], told[line["reached"]]) for line in self._lines("verdict")]
        return table(("goal", "measured", ""), rows)

    def alarms(self) -> list[str]:
        """The combination at its thresholds, the controls, and the best of all other rules at the loud one."""
        found = self._lines("alarms")
        ours = [line for line in found if line["rule"] == COMBINATION]
        controls = [line for line in found if line["rule"] in CONTROLS and line["threshold"] in (UNION, LOUD)]
        rest = [line for line in found if line["rule"] not in (COMBINATION, *CONTROLS) and line["threshold"] == LOUD]
        rest.sort(key=lambda line: -_number(line["announced_20"]))
        rows = [
            (
                line["rule"],
                NAMES[line["threshold"]],
                *(with_ends(line, name) for name in ("healthy_accused", "announced", "announced_20")),
                whole(line["lead"]),
                *(short(line[name]) for name in ("false_per_1000", "latched_per_1000")),
                *(short(line[f"{name}_with_alarm"]) for name in ("collapses", "too_fast", "faults")),
            )
            for line in (*ours, *controls, *rest[:OTHERS])
        ]
        columns = ("rule", "threshold", "healthy runs accused", "events announced", f"{LEAD} rows before")
        columns += ("median lead", "false alarms per 1,000 rows", "latched")
        return table((*columns, "of collapses", "of runs too fast", "of faults from outside"), rows)

    def families(self) -> list[str]:
        """The share of the events of each family that is announced."""
        found = self._lines("families")
        by = {(line["rule"], line["threshold"], line["family"]): line for line in found}
        rules = [(COMBINATION, UNION), (COMBINATION, LOUD), ("rate over edge", LOUD)]
        rows = []
        for family in dict.fromkeys(line["family"] for line in found):
            own = [by.get((*rule, family)) for rule in rules]
            count = next(line["announced_of"] for line in own if line is not None)
            cells = ["-" if line is None else short(line["announced"]) for line in own]
            rows.append((family.replace("_", " "), count, *cells))
        return table(("family", "events", *(f"{rule}, {NAMES[at]}" for rule, at in rules)), rows)

    def archs(self) -> list[str]:
        """Each architecture by what was fitted, and whose thresholds were set, without it."""
        rows = []
        for line in self._lines("archs", threshold=LOUD):
            told = (with_ends(line, name) for name in ("healthy_accused", "announced"))
            rows.append((line["left_out"], line["announced_of"], *told, whole(line["lead"])))
        return table(("left out", "events", "healthy runs accused", "events announced", "median lead"), rows)

    def sets(self) -> list[str]:
        """The bound of the calibration on disjoint sets."""
        rows = []
        for k in dict.fromkeys(line["k"] for line in self._lines("sets")):
            own = [int(line["alarm"]) for line in self._lines("sets", k=k)]
            rows.append((k, len(own), sum(own), f"{len(own) / (int(k) + 1):.1f}"))
        return table(("healthy runs k", "sets", "new runs with an alarm", "at most, on average"), rows)

    def findings(self) -> list[str]:
        """What diagnose said."""
        rows = [(line["measure"], with_ends(line, "share"), line["share_of"]) for line in self._lines("findings")]
        return table(("share of", "[95 %]", "runs"), rows)

    def causes(self) -> list[str]:
        """What diagnose named first, by what was done."""
        rows: dict[str, list[dict[str, str]]] = {}
        for line in self._lines("causes"):
            rows.setdefault(line["put in"], []).append(line)
        made = [
            (
                family.replace("_", " "),
                own[0]["runs"],
                own[0]["right"] or "-",
                ", ".join(f"{line['first'].replace('+', ' + ')} {line['times']}" for line in own),
            )
            for family, own in rows.items()
        ]
        return table(("put in", "runs", "right", "first, of so many runs"), made)

    def pairs(self) -> list[str]:
        """Of two runs of one schedule, how often the one with the event scores higher."""
        found = self._lines("pairs")
        kept = [line for line in found if line["rule"] in (COMBINATION, *CONTROLS, "rate over its past")]
        rest = sorted((line for line in found if line not in kept), key=lambda line: -_number(line["first"]))[:OTHERS]
        rows = [(line["rule"], with_ends(line, "first"), line["first_of"]) for line in (*kept, *rest)]
        return table(("rule", "the run with the event scores higher", "pairs"), rows)


def _number(text: str) -> float:
    value = float(text)
    return value if value == value else -1.0


def short(text: str) -> str:
    """A number without the zero before its point; "-" where there is none."""
    value = float(text)
    return "-" if value != value else f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def whole(text: str) -> str:
    value = float(text)
    return "-" if value != value else f"{value:.0f}"


def with_ends(line: Line, name: str) -> str:
    """A number with its interval; alone if one subject made it, of which no interval can be drawn."""
    middle, low, high = (short(line[f"{name}{end}"]) for end in ("", "_low", "_high"))
    alone = middle == "-" or float(line[f"{name}_low"]) == float(line[f"{name}_high"]) == float(line[name])
    return middle if alone else f"{middle} [{low}, {high}]"


def anew(page: str) -> str:
    return page_blocks.renewed(page, SecondCorpus().blocks, mark="second")


if __name__ == "__main__":
    raise SystemExit(page_blocks.main(__doc__, PAGES, anew))
