#!/usr/bin/env python
"""Every table, from the committed features and what was frozen.

python results/alarm/score.py          # recall.csv, left_out.csv, auc.csv, faults.csv, verdict.csv
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from combine import fit
from corpus import FIRST, HERE, CorpusRun, read
from events import (
    Outcome,
    Scores,
    false_rate,
    healthy_rows,
    interval,
    median_lead,
    outcomes,
    recall,
    threshold_at,
)
from freeze import COMBINATION, LEAD, RATES, families, load, scored
from rivals import rivals

AUC_AT = (25, 50, 100, 200)
BASES = (0.01, 0.1)
Line = dict[str, Any]


def rules(folder: Path = HERE) -> dict[str, tuple[str, Callable[[CorpusRun], np.ndarray], float | None]]:
    """name -> (group, score, own threshold), the combination first."""
    _, combination = load(folder)
    found = {COMBINATION: ("combination", combination.score(), None)}
    return {**found, **{rival.name: (rival.group, rival.score, rival.own) for rival in rivals().values()}}


def precision(found: Sequence[Outcome], base: float) -> float:
    """Share of runs with an alarm that fail, where a share ``base`` of runs does."""
    healthy = [one for one in found if one.run.outcome == "healthy"]
    wrong = np.mean([one.false > 0 for one in healthy]) if healthy else float("nan")
    right = base * recall(found)
    return float(right / (right + (1 - base) * wrong)) if right + (1 - base) * wrong > 0 else float("nan")


def statistics(found: Sequence[Outcome]) -> Line:
    """What is said of a rule at a threshold, each with its interval."""
    told: Line = {"failures": sum(one.fails for one in found), "healthy_rows": healthy_rows([o.run for o in found])}
    numbers: dict[str, Callable[[Sequence[Outcome]], float]] = {
        "recall": recall,
        "lead": median_lead,
        "recall_lead_5": partial(recall, lead=5),
        "recall_lead_20": partial(recall, lead=LEAD),
        "false_per_1000": false_rate,
    }
    for name, statistic in numbers.items():
        told[name], told[f"{name}_low"], told[f"{name}_high"] = (f"{own:.4g}" for own in interval(found, statistic))
    for base in BASES:
        told[f"precision_{base:g}"] = f"{precision(found, base):.3g}"
    told["benign_alarms"] = sum(one.benign for one in found)
    told["alarms_before_horizon"] = sum(one.before for one in found)
    return told


def recalls(runs: Sequence[CorpusRun], folder: Path = HERE) -> Iterator[Line]:
    """Each rule at the frozen thresholds, and at its own."""
    told, _ = load(folder)
    for name, (group, score, own) in rules(folder).items():
        scores = scored(runs, score)
        at = {f"{rate:g}": told["rules"][name]["thresholds"][str(rate)] for rate in RATES}
        for target, threshold in {**at, **({} if own is None else {"own": own})}.items():
            line = {"rule": name, "group": group, "target": target, "threshold": f"{threshold:.4g}"}
            yield {**line, **statistics(outcomes(runs, scores, threshold))}


def left_out(train: Sequence[CorpusRun], test: Sequence[CorpusRun], by: str, rate: float, folder: Path) -> dict:
    """rule -> outcomes on the test half, each failure by what was fitted and set without its family or architecture;
    healthy runs by the same where ``by`` is the architecture, else by each family's in turn."""
    told, combination = load(folder)
    groups = families(train) if by == "family" else sorted({run.arch for run in train})
    found: dict[str, list[Outcome]] = {}
    for group in groups:
        rest = [run for run in train if not _of(run, by, group)]
        here = [run for run in test if _of(run, by, group) or (by == "family" and run.outcome != "failure")]
        for name in dict.fromkeys((COMBINATION, told["to_beat"], told["to_beat_all"])):
            if name == COMBINATION:
                rule = fit(rest, combination.penalty).score()
            else:
                rule = rules(folder)[name][1]
            threshold = threshold_at(rest, scored(rest, rule), rate)
            found.setdefault(name, []).extend(outcomes(here, scored(here, rule), threshold))
    return found


def _of(run: CorpusRun, by: str, group: str) -> bool:
    if by == "family":
        return run.family == group and run.outcome == "failure"
    return run.arch == group


def paired(one: Sequence[Outcome], other: Sequence[Outcome]) -> tuple[float, float, float]:
    """Difference of recalls with a lead of 20 rows, over the same failures, with its interval over clusters."""
    gained: dict[str, list[float]] = {}
    for a, b in zip(one, other, strict=True):
        if a.fails:
            led = [own.lead is not None and own.lead >= LEAD for own in (a, b)]
            gained.setdefault(a.run.cluster, []).append(float(led[0]) - float(led[1]))
    groups, random = [*gained.values()], np.random.default_rng(0)
    if not groups:
        return float("nan"), float("nan"), float("nan")
    drawn = []
    for _ in range(1000):
        chosen = [own for place in random.integers(len(groups), size=len(groups)) for own in groups[place]]
        drawn.append(np.mean(chosen))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.mean([own for group in groups for own in group])), float(low), float(high)


def left_out_lines(train: Sequence[CorpusRun], test: Sequence[CorpusRun], folder: Path = HERE) -> Iterator[Line]:
    for by in ("family", "arch"):
        for rate in RATES:
            found = left_out(train, test, by, rate, folder)
            for name, own in found.items():
                line = {"left_out": by, "target": f"{rate:g}", "rule": name, **statistics(own)}
                gain = paired(found[COMBINATION], own) if name != COMBINATION else (float("nan"),) * 3
                told = ("gain_lead_20", "gain_low", "gain_high")
                yield {**line, **{key: f"{value:.4g}" for key, value in zip(told, gain, strict=True)}}


def auc(runs: Sequence[CorpusRun], scores: Scores, horizon: int, every: int = 10) -> float:
    """P(score of a run that fails within ``horizon`` rows > that of one that is healthy), of runs at the same row,
    averaged over rows with their numbers of pairs; ties count half."""
    total = pairs = 0.0
    for row in range(FIRST + every, max(run.rows for run in runs), every):
        near, well = [], []
        for run, score in zip(runs, scores, strict=True):
            if row >= run.rows:
                continue
            if run.outcome == "failure" and run.failed is not None and row < run.failed <= row + horizon:
                near.append(score[row])
            elif run.healthy[row]:
                well.append(score[row])
        if near and well:
            a, b = np.array(near)[:, None], np.array(well)[None]
            total += float((a > b).sum() + (a == b).sum() / 2)
            pairs += a.size * b.size
    return total / pairs if pairs else float("nan")


def aucs(runs: Sequence[CorpusRun], folder: Path = HERE) -> Iterator[Line]:
    for name, (group, score, _) in rules(folder).items():
        scores = scored(runs, score)
        yield {"rule": name, "group": group, **{f"auc_{h}": f"{auc(runs, scores, h):.3f}" for h in AUC_AT}}


def faults(runs: Sequence[CorpusRun], folder: Path = HERE) -> Iterator[Line]:
    """Faults from outside: share announced within 50 rows, and the median delay, at .5 false alarms per 1,000 rows."""
    told, _ = load(folder)
    struck = [run for run in runs if run.outcome == "fault"]
    for name, (group, score, _) in rules(folder).items():
        if group in ("signal",) and name != "RMS_t > 2.3":
            continue
        found = outcomes(struck, scored(struck, score), told["rules"][name]["thresholds"][str(RATES[0])])
        for family in sorted({run.family for run in struck}):
            own = [one for one in found if one.run.family == family]
            delays = [one.delay for one in own if one.delay is not None]
            yield {
                "rule": name,
                "fault": family,
                "runs": len(own),
                "announced": f"{len(delays) / len(own):.3g}",
                "delay": f"{np.median(delays):.3g}" if delays else "",
            }


def write(path: Path, found: Iterator[Line] | Sequence[Line]) -> list[Line]:
    made = list(found)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]) if made else [])
        writer.writeheader()
        writer.writerows(made)
    return made


def tables(train: Sequence[CorpusRun], test: Sequence[CorpusRun], folder: Path = HERE) -> None:
    write(folder / "recall.csv", recalls(test, folder))
    write(folder / "left_out.csv", left_out_lines(train, test, folder))
    write(folder / "auc.csv", aucs(test, folder))
    write(folder / "faults.csv", faults(test, folder))


if __name__ == "__main__":
    tables(read("train"), read("test"))
