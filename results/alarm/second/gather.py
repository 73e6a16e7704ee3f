#!/usr/bin/env python
"""Gathers the runs of ``benchmarks/faults/second_make.py`` into what is committed.

    python results/alarm/second/gather.py runs/second --half choose
    python results/alarm/second/gather.py runs/second --half test --half calibrate     # after frozen.json is committed

``runs.csv``: a line a run, with its labels; ``features/seed-N.parquet`` and ``features/calibrate-SUBJECT.parquet``: a
line a row. Rounded as in the first corpus (``results/alarm/keep.py``); labels are made of the rounded columns, so that
they can be made again from what is committed. What was gathered stays.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

import keep
from make import facts_of
from second_corpus import HERE, features_of, lines, refuse_unfrozen
from second_labels import Labels, labels
from second_training import MEASURED

LINE = (
    *("number", "run", "half", "subject", "family", "kind", "seed", "strength", "edge", "rows", "at", "outcome"),
    *("event", "began", "full", "height", "length", "collapse", "collapsed", "slow", "passing", "undecided"),
    *("diagnosis", "seconds", "commit", "torch", "cpu"),
)
EXACT = frozenset(MEASURED)


def gather(folder: Path, out: Path, halves: Sequence[str]) -> None:
    """Add what is new to what was gathered. Raises SystemExit for the halves that are not to be opened yet."""
    if {*halves} - {"choose"}:
        refuse_unfrozen(out)
    told = list(lines(out)) if (out / "runs.csv").exists() else []
    there = {line["run"] for line in told}
    new: dict[str, list[tuple[dict[str, Any], dict[str, np.ndarray]]]] = {}
    twins: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted(folder.glob("*.parquet")):
        facts = facts_of(path)
        if facts["half"] in halves and facts["run"] not in there:
            name = features_of(facts["half"], facts["seed"], facts["subject"])
            new.setdefault(name, []).append((facts, rounded(path)))
    for name, runs in sorted(new.items()):
        path = out / name
        parts = [pq.read_table(path)] if path.exists() else []
        first = sum(features_of(line["half"], int(line["seed"]), line["subject"]) == name for line in told)
        for number, (facts, columns) in enumerate(runs, first):
            twin = f"{facts['subject']}-twin-s{facts['seed']}"
            if twin not in twins:
                twins[twin] = rounded(folder / f"{twin}.parquet")
            told.append(line_of(facts, number, labels(columns, None if facts["family"] == "twin" else twins[twin])))
            rows = {
                "run": np.full(facts["rows"], number, np.int16),
                "row": np.arange(facts["rows"], dtype=np.int16),
            }
            kept = {own: values.astype(np.float32 if own in EXACT else np.float16) for own, values in columns.items()}
            parts.append(pa.table({**rows, **kept}))
        keep.write(pa.concat_tables(parts), path)
    with (out / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, LINE, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(told, key=lambda line: (line["half"], int(line["seed"]), line["run"])))


def rounded(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a run as they are kept."""
    table = pq.read_table(path)
    found = {}
    for name in table.column_names:
        values = table[name].to_numpy().astype(float)
        if name in EXACT:
            found[name] = keep.rounded(values, keep.EXACT_BITS).astype(np.float32).astype(float)
        else:
            found[name] = keep.small(name, values).astype(float)
    return found


def line_of(facts: Mapping[str, Any], number: int, ended: Labels) -> dict[str, Any]:
    told = {name: "" if facts.get(name) is None else facts[name] for name in LINE if name in facts}
    told.update(number=number, edge=f"{facts['edge']:.4g}", strength=f"{facts['strength']:.4g}")
    told.update(diagnosis=json.dumps(facts["diagnosis"]), commit=facts["commit"][:12])
    event, collapse = ended.event, ended.collapse
    told.update(outcome=ended.outcome, passing=json.dumps(list(ended.passing)))
    told.update(slow=_or(ended.slow), undecided=_or(ended.undecided))
    told.update(event=event.kind if event else "", began=event.began if event else "", full=event.full if event else "")
    told.update(height=f"{event.height:.4g}" if event else "", length=_or(event.length if event else None))
    told.update(collapse=collapse[0] if collapse else "", collapsed=collapse[1] if collapse else "")
    return told


def _or(value: int | None) -> int | str:
    return "" if value is None else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", action="append", choices=("choose", "test", "calibrate"), required=True)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    gather(options.folder, options.out, options.half)
