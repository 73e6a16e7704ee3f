#!/usr/bin/env python
"""Every table, from the committed features and what was frozen.

python results/alarm/score.py          # recall, auc, faults, curves, leads, left_out and verdict.csv
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from combine import Fit, fit
from corpus import FIRST, HERE, CorpusRun, read
from events import (
    Outcome,
    Ratio,
    Scores,
    Statistic,
    false_rate,
    healthy_rows,
    interval,
    median_lead,
    outcomes,
    recall,
    threshold_at,
    value,
)
from freeze import COMBINATION, LEAD, RATES, families, load, scored
from rivals import Rival, rivals

AUC_AT = (25, 50, 100, 200)
BASES = (0.01, 0.1)
CURVE = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # false alarms per 1,000 healthy rows
FEWEST = 100  # failures at t* > 50 below which the corpus decides nothing
GOAL_RECALL, GOAL_GAIN = 0.7, 0.15
Line = dict[str, Any]
Scored = Mapping[str, tuple[Rival, Scores]]


def rules(combination: Fit) -> dict[str, Rival]:
    """By name, the combination first."""
    return {COMBINATION: Rival(COMBINATION, "combination", combination.score()), **rivals()}


def precision(found: Sequence[Outcome], base: float) -> float:
    """Share of runs with an alarm that fail, where a share ``base`` of runs does; NaN where no healthy run had one,
    since that none ever has is not known."""
    healthy = [one for one in found if one.run.outcome == "healthy"]
    wrong = np.mean([one.false > 0 for one in healthy]) if healthy else float("nan")
    right = base * value(recall(found))
    return float(right / (right + (1 - base) * wrong)) if wrong > 0 else float("nan")


def statistics(found: Sequence[Outcome]) -> Line:
    """What is said of a rule at a threshold, each with its interval."""
    told: Line = {"failures": sum(one.fails for one in found), "healthy_rows": healthy_rows([o.run for o in found])}
    numbers: dict[str, Statistic] = {
        "recall": recall(found),
        "lead": median_lead(found),
        "recall_lead_5": recall(found, lead=5),
        "recall_lead_20": recall(found, lead=LEAD),
        "false_per_1000": false_rate(found),
    }
    for name, statistic in numbers.items():
        told[name], told[f"{name}_low"], told[f"{name}_high"] = (f"{own:.4g}" for own in interval(found, statistic))
    for base in BASES:
        told[f"precision_{base:g}"] = f"{precision(found, base):.3g}"
    told["benign_alarms"] = sum(one.benign for one in found)
    told["alarms_before_horizon"] = sum(one.before for one in found)
    return told


def recalls(runs: Sequence[CorpusRun], known: Scored, frozen: Mapping[str, Any]) -> Iterator[Line]:
    """Each rule at the frozen thresholds, and at its own."""
    for rule, scores in known.values():
        at = {f"{rate:g}": frozen["rules"][rule.name]["thresholds"][str(rate)] for rate in RATES}
        for target, threshold in {**at, **({} if rule.own is None else {"own": rule.own})}.items():
            line = {"rule": rule.name, "group": rule.group, "source": rule.source, "target": target}
            yield {**line, "threshold": f"{threshold:.4g}", **statistics(outcomes(runs, scores, threshold))}


def left_out(
    train: Sequence[CorpusRun], test: Sequence[CorpusRun], by: str, rate: float, frozen: Mapping[str, Any], own: Fit
) -> dict[str, list[Outcome]]:
    """rule -> outcomes on the test half, each failure by what was fitted and set without its family or architecture;
    healthy runs by the same where ``by`` is the architecture, else by each family's in turn."""
    known = rules(own)
    groups = families([*train, *test]) if by == "family" else sorted({run.arch for run in test})
    found: dict[str, list[Outcome]] = {}
    for group in groups:
        rest = [run for run in train if not _of(run, by, group)]
        here = [run for run in test if _of(run, by, group) or (by == "family" and run.outcome != "failure")]
        for name in dict.fromkeys((COMBINATION, frozen["to_beat"], frozen["to_beat_all"])):
            rule = fit(rest, own.penalty).score() if name == COMBINATION else known[name].score
            threshold = threshold_at(rest, scored(rest, rule), rate)
            found.setdefault(name, []).extend(outcomes(here, scored(here, rule), threshold))
    return found


def _of(run: CorpusRun, by: str, group: str) -> bool:
    if by == "family":
        return run.family == group and run.outcome == "failure"
    return run.arch == group


def paired(one: Sequence[Outcome], other: Sequence[Outcome]) -> tuple[float, float, float]:
    """Difference of recalls with a lead of 20 rows, over the same failures, with its interval over clusters."""
    first, second = recall(one, LEAD), recall(other, LEAD)
    return interval(one, Ratio(first.of - second.of, first.over))


def left_out_lines(
    train: Sequence[CorpusRun], test: Sequence[CorpusRun], frozen: Mapping[str, Any], own: Fit
) -> Iterator[Line]:
    for by in ("family", "arch"):
        for rate in RATES:
            found = left_out(train, test, by, rate, frozen, own)
            for name, of in found.items():
                line = {"left_out": by, "target": f"{rate:g}", "rule": name, **statistics(of)}
                gain = paired(found[COMBINATION], of) if name != COMBINATION else (float("nan"),) * 3
                told = ("gain_lead_20", "gain_low", "gain_high")
                yield {**line, **{key: f"{number:.4g}" for key, number in zip(told, gain, strict=True)}}


def auc(runs: Sequence[CorpusRun], scores: Scores, horizon: int, every: int = 10) -> float:
    """P(score of a run that fails within ``horizon`` rows > that of one that is healthy), of runs at the same row,
    averaged over rows with their numbers of pairs; ties count half."""
    rows = np.arange(FIRST + every, max(run.rows for run in runs), every)
    near, well = np.zeros((2, len(runs), len(rows)), dtype=bool)
    table = np.full(near.shape, np.nan)
    for place, (run, score) in enumerate(zip(runs, scores, strict=True)):
        inside = rows[rows < run.rows]
        table[place, : len(inside)] = score[inside]
        well[place, : len(inside)] = run.healthy[inside]
        if run.outcome == "failure" and run.failed is not None:
            near[place, : len(inside)] = (inside < run.failed) & (run.failed <= inside + horizon)
    total = pairs = 0.0
    for own, one, other in zip(table.T, near.T, well.T, strict=True):
        a, b = own[one][:, None], own[other][None]
        total += float((a > b).sum() + (a == b).sum() / 2)
        pairs += a.size * b.size
    return total / pairs if pairs else float("nan")


def aucs(runs: Sequence[CorpusRun], known: Scored) -> Iterator[Line]:
    for rule, scores in known.values():
        own = {f"auc_{horizon}": f"{auc(runs, scores, horizon):.3f}" for horizon in AUC_AT}
        yield {"rule": rule.name, "group": rule.group, **own}


def faults(runs: Sequence[CorpusRun], known: Scored, frozen: Mapping[str, Any]) -> Iterator[Line]:
    """Faults from outside: share announced within 50 rows, and the median delay, at .5 false alarms per 1,000 rows."""
    for rule, scores in known.values():
        if rule.group == "signal" and not rule.source:
            continue
        found = outcomes(runs, scores, frozen["rules"][rule.name]["thresholds"][str(RATES[0])])
        struck = [one for one in found if one.run.outcome == "fault"]
        for family in sorted({one.run.family for one in struck}):
            own = [one for one in struck if one.run.family == family]
            delays = [one.delay for one in own if one.delay is not None]
            yield {
                "rule": rule.name,
                "fault": family,
                "runs": len(own),
                "announced": f"{len(delays) / len(own):.3g}",
                "delay": f"{np.median(delays):.3g}" if delays else "",
            }


def strongest(recalled: Sequence[Line]) -> str:
    """The rule other than the combination that announces most failures 20 rows before, at .5 false alarms per 1,000
    rows of the training half: named after a look at the test half, so it favours the rival."""
    own = [line for line in recalled if line["target"] == f"{RATES[0]:g}" and line["rule"] != COMBINATION]
    return max(own, key=lambda line: float(line[f"recall_lead_{LEAD}"]))["rule"]


def curves(runs: Sequence[CorpusRun], known: Scored, frozen: Mapping[str, Any], rival: str) -> Iterator[Line]:
    """Recall at rates of false alarms of these very runs, of the combination, the baselines to beat and the strongest
    ``rival``, by family."""
    for name in dict.fromkeys((COMBINATION, frozen["to_beat"], frozen["to_beat_all"], rival)):
        rule, scores = known[name]
        for rate in CURVE:
            found = outcomes(runs, scores, threshold_at(runs, scores, rate))
            for family in ("all", *families(runs)):
                own = [one for one in found if one.fails and family in ("all", one.run.family)]
                line = {"rule": rule.name, "family": family, "rate": f"{rate:g}", "failures": len(own)}
                yield {**line, "recall": f"{value(recall(own)):.4g}", "led": f"{value(recall(own, LEAD)):.4g}"}


def leads(runs: Sequence[CorpusRun], known: Scored, frozen: Mapping[str, Any]) -> Iterator[Line]:
    """Each failure's lead by the combination and the baselines to beat, at .5 false alarms per 1,000 rows."""
    for name in dict.fromkeys((COMBINATION, frozen["to_beat"], frozen["to_beat_all"])):
        rule, scores = known[name]
        for one in outcomes(runs, scores, frozen["rules"][name]["thresholds"][str(RATES[0])]):
            if one.fails:
                lead = "" if one.lead is None else one.lead
                line = {"rule": rule.name, "run": one.run.name, "arch": one.run.arch, "family": one.run.family}
                yield {**line, "failed": one.run.failed, "lead": lead}


def verdict(lines: Sequence[Line], corpus: int) -> Iterator[Line]:
    """The goal, held against what came out with whole families and architectures left out; ``corpus``: failures from
    within at t* > 50, of both halves."""
    at = f"{RATES[0]:g}"
    for by in ("family", "arch"):
        own = {line["rule"]: line for line in lines if (line["left_out"], line["target"]) == (by, at)}
        ours, others = own[COMBINATION], [line for name, line in own.items() if name != COMBINATION]
        gains = [(float(line["gain_lead_20"]), float(line["gain_low"]), line["rule"]) for line in others]
        gain, low, rule = min(gains)
        enough = corpus >= FEWEST
        right = float(ours["recall"]) >= GOAL_RECALL and float(ours["lead"]) >= LEAD
        reached = enough and right and gain >= GOAL_GAIN and low > 0
        line = {"left_out": by, "corpus_failures": corpus, "failures": ours["failures"]}
        line |= {"recall": ours["recall"], "lead": ours["lead"]}
        yield {**line, "gain_lead_20": f"{gain:.4g}", "gain_low": f"{low:.4g}", "over": rule, "reached": int(reached)}


def write(path: Path, found: Iterator[Line] | Sequence[Line]) -> list[Line]:
    made = list(found)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]) if made else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)
    return made


def tables(train: Sequence[CorpusRun], test: Sequence[CorpusRun], folder: Path = HERE) -> None:
    frozen, own = load(folder)
    known = {name: (rule, scored(test, rule.score)) for name, rule in rules(own).items()}
    recalled = write(folder / "recall.csv", recalls(test, known, frozen))
    write(folder / "auc.csv", aucs(test, known))
    write(folder / "faults.csv", faults(test, known, frozen))
    write(folder / "curves.csv", curves(test, known, frozen, strongest(recalled)))
    write(folder / "leads.csv", leads(test, known, frozen))
    held = write(folder / "left_out.csv", left_out_lines(train, test, frozen, own))
    corpus = sum(run.outcome == "failure" for run in (*train, *test))
    write(folder / "verdict.csv", verdict(held, corpus))


if __name__ == "__main__":
    tables(read("train"), read("test"))
