#!/usr/bin/env python
"""Draws the tables of score.py: recall against false alarms by family, leads, and one run with its alarm.

python results/alarm/draw.py      # figures/roc.png, leads.png, one-run.png, each with what it shows as CSV
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from combine import Fit
from corpus import FIRST, HERE, HORIZON, CorpusRun, lines, read
from events import alarms, outcome
from freeze import COMBINATION, LEAD, RATES, load, scored

from stabilitylab.reports.base import Panel, Picture, Reference, Series
from stabilitylab.reports.paper import write

COLOURS = ("#1b6ca8", "#c8553d", "#7a7a7a")  # the combination, and its rivals
MARKERS = ("o", "s", "^")
BLACK = "#222222"
Lines = Sequence[dict[str, str]]


def told(runs: int) -> str:
    return f"test half, {runs} failures from within at t* > 50"


def roc(found: Lines) -> Picture:
    """Recall of failures against the rate of false alarms, a panel a family: there, of those announced 20 rows before
    or earlier."""
    looks = zip(COLOURS, MARKERS, strict=True)
    rules = dict(zip(dict.fromkeys(line["rule"] for line in found), looks, strict=False))
    panels = []
    for family in dict.fromkeys(line["family"] for line in found):
        own = [line for line in found if line["family"] == family]
        series, failures = [], int(own[0]["failures"])
        for rule, (colour, marker) in rules.items():
            at = [line for line in own if line["rule"] == rule]
            x = [float(line["rate"]) for line in at]
            for key, dash, detail in (("led", "solid", f"{LEAD} rows before"), ("recall", "dotted", "at all")):
                y = [float(line[key]) for line in at]
                if family == "all":
                    look = {"colour": colour, "marker": marker}
                    series.append(Series(rule, x, y, dash=dash, detail=detail, seeds=failures, **look))
                elif key == "led":
                    series.append(Series(rule, x, y, colour=colour, marker=marker, seeds=failures))
        title = f"{'all families' if family == 'all' else family.replace('_', ' ')}, n = {failures}"
        share = "share announced" if family == "all" else f"share {LEAD} rows before"
        panels.append(Panel(title, "false alarms per 1,000 healthy rows", share, series, log_x=True, limits=(0, 1.03)))
    best = max((line for line in found if line["family"] == "all" and line["rule"] == COMBINATION), key=_near)
    finding = (
        f"At {RATES[0]:g} false alarms per 1,000 healthy rows the combination announces {float(best['recall']):.2f} of "
        f"the failures, {float(best['led']):.2f} of them {LEAD} rows before or earlier."
    )
    last = [*rules][-1]
    key = f"{last}: the strongest other rule, named on the test half itself" if len(rules) > 1 else ""
    return Picture(panels, finding, columns=3, provenance=told(int(best["failures"])), band="", key=key)


def _near(line: dict[str, str]) -> float:
    return -abs(float(line["rate"]) - RATES[0])


def leads(found: Lines) -> Picture:
    """The share of failures that were announced so many rows before, a line a rule."""
    rules = dict(zip(dict.fromkeys(line["rule"] for line in found), COLOURS, strict=False))
    at = np.arange(-5, 201)
    series, medians = [], []
    for rule, colour in rules.items():
        own = [line["lead"] for line in found if line["rule"] == rule]
        known = np.array([int(lead) for lead in own if lead])
        series.append(
            Series(rule, at, [(known >= lead).sum() / len(own) for lead in at], colour=colour, seeds=len(own))
        )
        medians.append(f"{rule} {np.median(known):g}" if len(known) else f"{rule} announces none")
    panel = Panel(
        "Announced at least so early",
        "rows before the failure",
        "share of failures",
        series,
        [Reference(LEAD, f"{LEAD} rows", vertical=True), Reference(0, "t*", vertical=True)],
        limits=(0, 1.03),
    )
    runs = len({line["run"] for line in found})
    return Picture(
        [panel], f"Median rows before the failure: {'; '.join(medians)}.", provenance=told(runs), columns=1, band=""
    )


def typical(found: Lines) -> str:
    """The run whose lead by the combination is the median (the lower of two); of those without one, the first."""
    own = [line for line in found if line["rule"] == COMBINATION]
    led = sorted((line for line in own if line["lead"]), key=lambda line: (int(line["lead"]), line["run"]))
    return (led[(len(led) - 1) // 2] if led else own[0])["run"]


def one_run(run: CorpusRun, combination: Fit, threshold: float, twin: CorpusRun | None = None) -> Picture:
    """Its loss, its held-out loss beside the twin's, from which t* may come, and the score of the combination with its
    threshold."""
    [score] = scored([run], combination.score())
    lead = outcome(run, score, threshold).lead
    spoke = [FIRST + row for row in alarms(score[FIRST : run.rows], threshold)]
    ended = [Reference(run.failed, "t*", vertical=True)] if run.failed is not None else []
    rows, shown = np.arange(run.rows), np.where(np.isfinite(score), score, np.nan)
    panels = [
        Panel(
            "Training loss",
            "update",
            "nats a token",
            [Series("loss", rows, run.columns["nll"], colour=COLOURS[0], marker="none")],
            ended,
            direct=True,
        ),
        *([_beside(run, twin, ended)] if twin is not None else []),
        Panel(
            "What the rule adds up",
            "update",
            "score",
            [
                Series("score", rows, shown, colour=COLOURS[0], marker="none"),
                Series("alarm", spoke, score[spoke], colour=BLACK, kind="crosses"),
            ],
            [Reference(threshold, "threshold"), *ended],
            direct=True,
        ),
    ]
    told = "It is not announced" if lead is None else f"It is announced {lead} rows before"
    early = sum(row < run.failed - HORIZON for row in spoke) if run.failed is not None else 0
    often = "once" if early == 1 else f"{early} times"
    more = f", and {often} more than {HORIZON} rows before, which counts as nothing" if early else ""
    why = f" ({run.why})" if run.why else ""
    finding = f"{run.name} ({run.family.replace('_', ' ')}) fails at row {run.failed}{why}. {told}{more}."
    told = "a run of the test half, the one with the median lead"
    return Picture(panels, finding, provenance=told, columns=len(panels))


def _beside(run: CorpusRun, twin: CorpusRun, marks: Sequence[Reference]) -> Panel:
    """The held-out losses of a run and its twin, where they were measured."""
    found = []
    for one, name, colour in ((run, "run", COLOURS[0]), (twin, "twin", COLOURS[2])):
        loss = one.columns["held_out"]
        at = np.flatnonzero(np.isfinite(loss))
        found.append(Series(name, at, loss[at], colour=colour, dash="solid", marker="none"))
    return Panel("Held-out loss", "update", "nats a token", found, marks, direct=True)


def twin_of(run: CorpusRun, runs: Sequence[CorpusRun]) -> CorpusRun | None:
    """The healthy run of the same subject and seed with which it is compared; None without held-out losses of both."""
    if "held_out" not in run.columns:
        return None
    twins = (one for one in runs if one.cluster == run.cluster and one.family == "twin" and one is not run)
    return next((one for one in twins if "held_out" in one.columns), None)


def main(folder: Path = HERE, test: Sequence[CorpusRun] | None = None) -> None:
    frozen, own = load(folder)
    found = list(lines(folder, "leads.csv"))
    name = typical(found)
    runs = read("test", folder) if test is None else test
    run = next(run for run in runs if run.name == name)
    threshold = frozen["rules"][COMBINATION]["thresholds"][str(RATES[0])]
    pictures = {
        "roc": roc(list(lines(folder, "curves.csv"))),
        "leads": leads(found),
        "one-run": one_run(run, own, threshold, twin_of(run, runs)),
    }
    for each, picture in pictures.items():
        write(picture, folder / "figures", each)


if __name__ == "__main__":
    main()
