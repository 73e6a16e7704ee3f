#!/usr/bin/env python
"""Fits what ``stabilitylab forecast`` uses, and stores it with its cover and its errors on architectures left out.

python results/forecast/fit.py [--folder results/forecast] [--out stabilitylab/forecast/fitted.json] [--known ...]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import draw
import forecasters
import make
import pandas as pd
import score
import truth
from loading import Tables, load
from measures import spread

from stabilitylab.forecast.fitting import FILE, Cover, Fitted
from stabilitylab.forecast.known import FILE as KNOWN
from stabilitylab.forecast.known import Known, KnownEdges, design

SAME = ("width", "stacks", "optimizer", "clipping", "precision")
NEAR = ("tokens", "classes")


def cover(folder: Path, tables: Tables, names: Sequence[str]) -> Cover:
    """What the runs of a fit have in common, and what they lie between: depth, warm-up, the predictors that count."""
    used = {(str(a), int(n)) for a, n in zip(tables.runs["arch"], tables.runs["layers"], strict=True)}
    rows = pd.read_csv(folder / "predictors.csv").to_dict("records")
    rows = [row for row in rows if (row["arch"], int(row["layers"])) in used]
    same = {name: rows[0][name] for name in SAME}
    if any(row[name] != value for row in rows for name, value in same.items()):
        raise SystemExit("predictors.csv has rows of different settings: a fit needs one.")
    return Cover(same, {name: rows[0][name] for name in NEAR}, forecasters.cover(tables, names).between)


def fitted(folder: Path) -> Fitted:
    """By the one of :data:`forecasters.COMMAND` that did best on architectures left out."""
    tables = load(folder).only(lambda rows: rows["shift"] == 0)
    found, edges = score.judged(tables)
    name = score.chosen(found)
    final = last(folder)
    return Fitted(
        version=f"3 ({len(tables.runs)} runs)",
        line=forecasters.fitted(tables, forecasters.COMMAND[name]),
        cover=cover(folder, tables, forecasters.COMMAND[name]),
        spread=spread(edges, name),
        errors=sentence(found, name, final),
        goal=reached(found, name),
        final_goal=None if final is None else reached(final[1], name),
        runs=len(tables.runs),
        archs=sorted(set(tables.runs["arch"])),
    )


WORDS = {
    forecasters.NINE: "nine predictors",
    forecasters.RANGE: "a range test",
    forecasters.TRIALS: "trials of 150 updates",
}


def reached(found: score.Scores, name: str) -> bool:
    return name in found.goals and found.goals[name].reached


def last(folder: Path) -> tuple[str, score.Scores] | None:
    """The depths of the final test, and its scores; None where it was not made."""
    tables = load(folder, score.FINAL)
    depths = sorted({*tables.edges.loc[tables.edges["shift"] != 0, "layers"]})
    return (" and ".join(map(str, depths)), score.final(tables)) if depths else None


def sentence(found: score.Scores, name: str, final: tuple[str, score.Scores] | None = None) -> str:
    """What forecasts by ``name`` are worth: on architectures left out, and on the final test."""
    own, others = found.each[name], found.each[forecasters.FREQUENCY]
    best = next(iter(found.goals.values()))
    rival = found.each[best.best].auc if best.best in found.each else found.each[forecasters.NINE].auc - best.gain[0]
    first = f"; {WORDS[forecasters.NINE]}, tried first, are off by {found.each[forecasters.NINE].median:.2f}"
    told = (
        f"by {WORDS[name]} the edge is off by a factor of {own.median:.2f} (median; the median edge of the others: "
        f"{others.median:.2f}), within 2 for {own.within:.0%} of {found.archs} (goal: {score.SHARE:.0%}); of one that "
        f"fails and one that trains it names the right one {own.auc:.0%} of the time (the best simple rule, "
        f"{best.best}: {rival:.0%}). This {_goals(found, name)} that were set beforehand"
        f"{first * (name == forecasters.TRIALS)}."
    )
    if final is None:
        return told
    layers, test = final
    own = test.each[name]
    return (
        f"{told} At {layers} layers, which no fit had seen (the final test): off by {own.median:.2f}, within 2 for "
        f"{own.within:.0%} of {test.archs}, the right one {own.auc:.0%} of the time; this {_goals(test, name)}."
    )


def _goals(found: score.Scores, name: str) -> str:
    return f"{'reaches' if reached(found, name) else 'misses'} the goals"


def known(folder: Path) -> KnownEdges:
    """The edges that all seeds of a case have, with what they are edges of; those of the final test, too."""
    found = []
    for (*_, warmup), own in draw.edges(folder / "runs.csv").items():
        low = min(cell.rate(int(edge.low)) if math.isfinite(edge.low) else 0.0 for cell, edge in own)
        high = max(cell.rate(int(edge.high)) if math.isfinite(edge.high) else math.inf for cell, edge in own)
        found.append(Known(design(make.config(own[0][0], 0, "synthetic")), warmup, low, high, len(own)))
    return KnownEdges(*truth.TEXT, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=score.HERE)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--known", type=Path, default=KNOWN, help="where the edges that are known go")
    given = parser.parse_args()
    found = fitted(given.folder)
    found.write(given.out)
    known(given.folder).write(given.known)
    print(found.errors)


if __name__ == "__main__":
    main()
