#!/usr/bin/env python
"""Fits what ``stabilitylab forecast`` uses, and stores it with its cover and its errors on architectures left out.

python results/forecast/fit.py [--folder results/forecast] [--out stabilitylab/forecast/fitted.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import score
from loading import Tables, load, ranges
from measures import spread

from stabilitylab.forecast.fitting import FEATURES, FILE, Cover, Fitted

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
    between = {name: ends for name, ends in ranges(tables).items() if name in (*names, "layers", "warmup")}
    return Cover(same, {name: rows[0][name] for name in NEAR}, between)


USED = {score.OURS: FEATURES, score.RANGE: score.ONE_RANGE}  # of these two the command takes the better one


def fitted(folder: Path) -> Fitted:
    """The one whose edges of architectures left out are off by less; the final test was not looked at for that."""
    tables = load(folder).only(lambda rows: rows["shift"] == 0)
    found, edges = score.judged(tables)
    name, other = sorted(USED, key=lambda one: found.each[one].error)
    return Fitted(
        version=f"1 ({len(tables.runs)} runs)",
        line=score.fitted(tables, USED[name]),
        cover=cover(folder, tables, USED[name]),
        spread=spread(edges, name),
        errors=sentence(found, name, other),
        goal=found.reached,
        runs=len(tables.runs),
        archs=sorted(set(tables.runs["arch"])),
    )


def sentence(found: score.Scores, name: str, other: str) -> str:
    own, others = found.each[name], found.each[score.FREQUENCY]
    words = {score.OURS: "the fit of nine predictors", score.RANGE: "the range test alone"}
    return (
        f"by {words[name]}, which does better than {words[other]}, the edge is off by a factor of {own.median:.2f} "
        f"(median; the median edge of the other architectures: {others.median:.2f}), within 2 for {own.within:.0%} of "
        f"the {found.archs} with one inside the grid; of one that fails and one that trains at the same depth, rate "
        f"and warm-up it names the right one {own.auc:.0%} of the time (the best simple rule, {found.best}: "
        f"{found.ours.auc - found.gain[0]:.0%})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=score.HERE)
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    found = fitted(given.folder)
    found.write(given.out)
    print(found.errors)


if __name__ == "__main__":
    main()
