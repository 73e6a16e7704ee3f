#!/usr/bin/env python
"""Gathers the runs of ``benchmarks/faults/make.py`` into what is committed.

    python results/alarm/keep.py runs/faults [--half train]

``runs.csv``: a line a run; ``features/seed-N.parquet``: a line a row, signals to seven bits (within .8 %; z-scores
within 6e4), losses, norms and rates to sixteen (within 2e-5): so the corpus stays below 20 MB. What was kept stays, so
that it can be made in several goes, on several machines.
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
from corpus import HERE, features_of, lines

sys.path.append(str(HERE.parents[1] / "benchmarks" / "faults"))

from failure import failure
from make import facts_of

LINE = (
    *("number", "run", "half", "subject", "family", "kind", "seed", "strength", "edge", "rows", "at", "failed"),
    *("why", "benign", "open", "diagnosis", "preflight", "commit", "torch", "cpu"),
)
EXACT = ("nll", "gradient", "lr", "held_out")
BITS, EXACT_BITS = 7, 16


def small(name: str, values: np.ndarray) -> np.ndarray:
    """The values as they are kept; what is not a number stays so, and infinity of losses."""
    if name in EXACT:
        return rounded(values, EXACT_BITS).astype(np.float32)
    return rounded(np.clip(values, -6e4, 6e4), BITS).astype(np.float16)


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """To so many significant bits."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)


def keep(folder: Path, out: Path, halves: Sequence[str]) -> None:
    """Adds what is new to what was kept; a seed of which nothing is new keeps its file as it is."""
    told = list(lines(out)) if (out / "runs.csv").exists() else []
    there = {line["run"] for line in told}
    new: dict[int, list[tuple[dict[str, Any], pa.Table]]] = {}
    for path in sorted(folder.glob("*.parquet")):
        facts = facts_of(path)
        if facts["half"] in halves and facts["run"] not in there:
            twin = folder / f"{facts['subject']}-twin-s{facts['seed']}.parquet"
            table = pq.read_table(path)
            ended = judged(facts, table, None if twin == path else facts_of(twin))
            new.setdefault(facts["seed"], []).append((ended, table))
    for seed, runs in sorted(new.items()):
        path = out / features_of(seed)
        parts = [pq.read_table(path)] if path.exists() else []
        first = sum(line["seed"] == str(seed) for line in told)
        for number, (facts, table) in enumerate(runs, first):
            told.append(line_of(facts, number))
            columns = {
                "run": np.full(table.num_rows, number, dtype=np.int16),
                "row": np.arange(table.num_rows, dtype=np.int16),
                **{name: small(name, table[name].to_numpy()) for name in table.column_names},
            }
            parts.append(pa.table(columns))
        write(pa.concat_tables(parts), path)
    with (out / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, LINE, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(told, key=lambda line: (int(line["seed"]), int(line["number"]))))


def write(whole: pa.Table, path: Path) -> None:
    """The features of a seed, as small as they get."""
    split = [name for name in whole.column_names if name not in ("run", "row")]
    options: dict[str, Any] = {"use_dictionary": ["run"], "use_byte_stream_split": split}
    path.parent.mkdir(exist_ok=True)
    pq.write_table(whole, path, compression="brotli", compression_level=11, **options)


def judged(facts: dict[str, Any], table: pa.Table, twin: Mapping[str, Any] | None) -> dict[str, Any]:
    """With when it failed, by the definition as it stands now."""
    loss, gradient = (table[name].to_numpy().astype(float) for name in ("nll", "gradient"))
    ended = failure(loss, gradient, facts["held_out"], None if twin is None else twin["held_out"])
    return {**facts, "failed": ended.step, "why": ended.why, "benign": list(ended.benign), "open": ended.open}


def line_of(facts: Mapping[str, Any], number: int) -> dict[str, Any]:
    told = {name: "" if facts.get(name) is None else facts[name] for name in LINE if name != "number"}
    told.update({name: json.dumps(facts[name]) for name in ("benign", "diagnosis", "preflight")})
    told.update(number=number, edge=f"{facts['edge']:.4g}", strength=f"{facts['strength']:.4g}")
    return {**told, "commit": facts["commit"][:12]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=("train", "test"), help="leave the other half unopened")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    keep(options.folder, options.out, (options.half,) if options.half else ("train", "test"))
