#!/usr/bin/env python
"""An illustration of `stabilitylab alarm --calibrate`: twins of the training half, and an alarm for one more twin.

python results/alarm/own_runs.py      # own_runs.csv, and two lines on stdout

The twins of a subject are healthy runs of one recipe, which differ in their seed alone. The last seed is the new run,
and the seeds before it calibrate: every set has each run once. The training half made the weights of the combination,
and its sets are few, so this is no test of the bound.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from corpus import FIRST, HERE, CorpusRun, read

from stabilitylab.alarm import Reading, fitted

OUT = HERE / "own_runs.csv"
COLUMNS = ("subject", "k", "new", "score", "largest", "alarm")
Line = dict[str, str]


def largest(run: CorpusRun) -> float:
    """The largest score of the combination after the first 20 rows."""
    (rule,) = fitted("combination").rules
    columns = [(name, run.columns[name]) for name in rule.weights]
    found = [
        rule.score({name: Reading(own[row]) for name, own in columns if np.isfinite(own[row])})[0]
        for row in range(FIRST, run.rows)
    ]
    return float(np.nanmax(found))


def lines(runs: Sequence[CorpusRun]) -> Iterator[Line]:
    """A line for each subject with two twins or more."""
    for subject in dict.fromkeys(run.subject for run in runs):
        twins = [run for run in runs if run.subject == subject and run.family == "twin" and run.outcome == "healthy"]
        *before, new = sorted(twins, key=lambda run: run.seed)
        if before:
            score, most = largest(new), max(map(largest, before))
            told = (subject, str(len(before)), new.name, f"{score:.4g}", f"{most:.4g}", str(int(score > most)))
            yield dict(zip(COLUMNS, told, strict=True))


def sentences(found: Sequence[Line]) -> Iterator[str]:
    for k in sorted({int(line["k"]) for line in found}):
        own = [line for line in found if int(line["k"]) == k]
        alarms = sum(int(line["alarm"]) for line in own)
        yield f"k = {k}: {alarms} of {len(own)} new healthy runs have an alarm; the bound is {len(own) / (k + 1):.3g}"


def main(out: Path = OUT) -> None:
    found = list(lines(read("train")))
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print("\n".join(sentences(found)))


if __name__ == "__main__":
    main()
