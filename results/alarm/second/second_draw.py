#!/usr/bin/env python
"""Draws the second corpus: events announced against healthy runs accused, leads, and one run with its alarm.

python results/alarm/second/second_draw.py      # figures/announced.png, leads.png, one-run.png, each with its CSV
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

from draw import COLOURS, MARKERS, one_run
from second_corpus import HERE, SecondRun, lines, read
from second_freeze import load
from second_rules import COMBINATION, UNION, announced, known, well
from second_score import LEAD, LOUD, Scored, scored

from stabilitylab.reports.base import Panel, Picture, Reference, Series
from stabilitylab.reports.paper import write

RIVAL = "rate over edge"


def strongest(folder: Path = HERE) -> str:
    """The rule, of those that are neither ours nor a control, with the most events announced 20 rows before at the
    loud threshold; named on the test half itself."""
    found = [line for line in lines(folder, "alarms.csv") if line["threshold"] == LOUD]
    rest = [line for line in found if line["rule"] not in (COMBINATION, "rate", RIVAL, "rate over its past", "chance")]
    return max(rest, key=lambda line: float(line["announced_20"]))["rule"]


def curve(runs: Sequence[SecondRun], told: Scored) -> tuple[list[float], list[float], list[float]]:
    """Return, for every threshold that changes something, the share of healthy runs accused, of events announced, and
    of events announced 20 rows before or earlier."""
    maxima = sorted((float(told[run.name].max(initial=-np.inf)) for run in well(runs)), reverse=True)
    found = [_point(runs, told, limit) for limit in (*dict.fromkeys(maxima), -np.inf)]
    accused, at_all, early = (list(column) for column in zip(*found, strict=True))
    return accused, at_all, early


def announcing(runs: Sequence[SecondRun], by_rule: Mapping[str, Scored], limits: Mapping[str, float]) -> Picture:
    """Events announced 20 rows before against healthy runs accused, and events announced at all."""
    events = sum(run.outcome == "failure" for run in runs)
    early, at_all, finding = list[Series](), list[Series](), ""
    for (name, told), colour in zip(by_rule.items(), COLOURS, strict=False):
        x, all_of, led = curve(runs, told)
        look = {"colour": colour, "marker": "none", "dash": "solid"}
        early.append(Series(name, x, led, seeds=events, **look))
        at_all.append(Series(name, x, all_of, seeds=events, **look))
        if name == COMBINATION:
            for (label, limit), marker in zip(limits.items(), MARKERS, strict=False):
                accused, announced_at_all, led_at = _point(runs, told, limit)
                mark = {"colour": colour, "marker": marker, "kind": "points", "seeds": events}
                early.append(Series(label, [accused], [led_at], **mark))
                at_all.append(Series(label, [accused], [announced_at_all], **mark))
                if label == "loud":
                    finding = (
                        f"At its loud threshold the combination accuses {100 * accused:.0f} % of healthy runs and "
                        f"announces {100 * announced_at_all:.0f} % of the events, {100 * led_at:.0f} % {LEAD} "
                        "rows before or earlier."
                    )
    panels = [
        Panel(
            f"{LEAD} rows before, or earlier",
            "share of healthy runs with an alarm",
            "share of events",
            early,
            limits=(0, 1.03),
        ),
        Panel("At all", "share of healthy runs with an alarm", "share of events", at_all, limits=(0, 1.03)),
    ]
    last = [*by_rule][-1]
    key = f"{last}: the strongest other rule, named on the test half itself"
    return Picture(panels, finding, columns=2, provenance=_told(events), band="", key=key)


def _point(runs: Sequence[SecondRun], told: Scored, limit: float) -> tuple[float, float, float]:
    healthy, events = well(runs), [run for run in runs if run.outcome == "failure"]
    leads = [announced(run, told[run.name], limit) for run in events]
    shares = sum(lead is not None for lead in leads), sum(lead is not None and lead >= LEAD for lead in leads)
    accused = sum(bool((told[run.name] > limit).any()) for run in healthy) / len(healthy)
    return accused, shares[0] / len(events), shares[1] / len(events)


def _told(events: int) -> str:
    return f"test half, {events} events full-blown after row 50"


def leads(runs: Sequence[SecondRun], by_rule: Mapping[str, Scored], limits: Mapping[str, float]) -> Picture:
    """The share of events that were announced so many rows before at the loud threshold, a line a rule."""
    events = [run for run in runs if run.outcome == "failure"]
    at, series, medians = np.arange(0, 201), list[Series](), list[str]()
    for (name, told), colour in zip(by_rule.items(), COLOURS, strict=False):
        own = [announced(run, told[run.name], limits[name]) for run in events]
        rows = np.array([lead for lead in own if lead is not None])
        series.append(Series(name, at, [(rows >= lead).sum() / len(own) for lead in at], colour=colour, seeds=len(own)))
        medians.append(f"{name} {np.median(rows):g}" if len(rows) else f"{name} announces none")
    marks = [Reference(LEAD, f"{LEAD} rows", vertical=True)]
    panel = Panel(
        "Announced at least so early",
        "rows before the event is full-blown",
        "share of events",
        series,
        marks,
        limits=(0, 1.03),
    )
    finding = f"Median rows before, at the loud thresholds: {'; '.join(medians)}."
    return Picture([panel], finding, provenance=_told(len(events)), columns=1, band="")


def typical(runs: Sequence[SecondRun], told: Scored, limit: float) -> SecondRun:
    """The run whose lead by the combination is the median (the lower of two); of events without one, the first."""
    events = [run for run in runs if run.outcome == "failure"]
    found = [(lead, run.name, run) for run in events if (lead := announced(run, told[run.name], limit)) is not None]
    return sorted(found)[(len(found) - 1) // 2][2] if found else events[0]


def main(folder: Path = HERE) -> None:
    runs = read(("test",), folder)
    frozen, own = load(folder)
    rules = known(own)
    by_rule = {name: scored(runs, rules[name]) for name in (COMBINATION, RIVAL, strongest(folder))}
    loud = {name: frozen["thresholds"][name][LOUD] for name in by_rule}
    ours = {"loud": loud[COMBINATION]}
    if np.isfinite(limit := frozen["thresholds"][COMBINATION][UNION]):
        ours["default"] = limit
    run = typical(runs, by_rule[COMBINATION], loud[COMBINATION])
    twin = next(one for one in runs if one.cluster == run.cluster and one.family == "twin")
    pictures = {
        "announced": announcing(runs, by_rule, ours),
        "leads": leads(runs, by_rule, loud),
        "one-run": one_run(run, own, loud[COMBINATION], None if twin is run else twin),
    }
    for name, picture in pictures.items():
        write(picture, folder / "figures", name)


if __name__ == "__main__":
    main()
