#!/usr/bin/env python
"""Fits what ``stabilitylab forecast`` uses, and stores it with its cover and its errors on architectures left out.

python results/forecast/fit.py [--folder results/forecast] [--out stabilitylab/forecast/fitted.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
import score
from loading import Tables, load, ranges
from measures import spread

from stabilitylab.forecast.fitting import FILE, Cover, Fitted

SAME = ("width", "stacks", "optimizer", "clipping", "precision")
NEAR = ("tokens", "classes")


def cover(folder: Path, tables: Tables) -> Cover:
    """What the runs of a fit have in common, and what they lie between."""
    used = {(str(a), int(n)) for a, n in zip(tables.runs["arch"], tables.runs["layers"], strict=True)}
    rows = pd.read_csv(folder / "predictors.csv").to_dict("records")
    rows = [row for row in rows if (row["arch"], int(row["layers"])) in used]
    same = {name: rows[0][name] for name in SAME}
    if any(row[name] != value for row in rows for name, value in same.items()):
        raise SystemExit("predictors.csv has rows of different settings: a fit needs one.")
    return Cover(same, {name: rows[0][name] for name in NEAR}, ranges(tables))


def fitted(folder: Path) -> Fitted:
    tables = load(folder).only(lambda rows: rows["shift"] == 0)
    found, edges = score.judged(tables)
    errors = (
        f"the edge is off by a factor of {found.median:.2f} (median), within 2 for {found.within:.0%} of the "
        f"{found.archs} with one inside the grid; of one that fails and one that trains at the same depth, rate and "
        f"warm-up it names the right one {found.auc:.0%} of the time, the best simple rule ({found.best}) "
        f"{found.auc - found.gain[0]:.0%}."
    )
    return Fitted(
        version=f"1 ({len(tables.runs)} runs)",
        line=score.fitted(tables),
        cover=cover(folder, tables),
        spread=spread(edges, score.OURS),
        errors=errors,
        goal=found.reached,
        runs=len(tables.runs),
        archs=sorted(set(tables.runs["arch"])),
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
