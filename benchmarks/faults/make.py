#!/usr/bin/env python
"""Makes the corpus, run by run; what is there is not made again, so a stopped call goes on where it was.

    python benchmarks/faults/make.py --data PATH/multi30k --out runs/faults [--half train] [--part 1/2]

A run is one Parquet file of its rows, written when it is whole; ``results/alarm/keep.py`` gathers them. What it has
kept is not made again either, but for a twin that another run needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from families import FAMILIES, UPDATES
from pilot import edges, read
from recipes import half, recipes
from subjects import SUBJECTS
from training import COLUMNS, Course, Recipe, train

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results" / "alarm" / "runs.csv"  # the runs that are committed
COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()


def write(recipe: Recipe, course: Course, edge: float, path: Path) -> None:
    """The rows as float32 columns, and what the run was and became as metadata."""
    facts = {
        **recipe.__dict__,
        "run": recipe.name,
        "half": half(recipe.seed),
        "kind": FAMILIES[recipe.family].kind,
        "edge": edge,
        "rows": len(course.rows),
        "at": course.at,
        "failed": course.failure.step,
        "why": course.failure.why,
        "benign": list(course.failure.benign),
        "open": course.failure.open,
        "held_out": course.held_out,
        "places": course.places,
        "diagnosis": course.diagnosis,
        "preflight": course.preflight,
        "commit": COMMIT,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    store({name: course.rows[:, number] for number, name in enumerate(COLUMNS)}, facts, path)


def store(columns: Mapping[str, np.ndarray], facts: Mapping[str, Any], path: Path) -> None:
    """Columns as float32 and facts as metadata, in a file that is whole when it has its name."""
    small = {name: own.astype(np.float32) for name, own in columns.items()}
    table = pa.table(small).replace_schema_metadata({"run": json.dumps(facts)})
    part = path.with_name(f".{path.name}")
    pq.write_table(table, part, compression="zstd")
    part.rename(path)


def facts_of(path: Path) -> dict:
    return json.loads(pq.read_schema(path).metadata[b"run"])


def make(recipe: Recipe, out: Path, text: Path | None, updates: int = UPDATES) -> Path:
    """One run, or the one that is there. Its twin's held-out losses are read where it has a twin."""
    path = out / f"{recipe.name}.parquet"
    if not path.exists():
        edge = edges()[recipe.subject]
        twin = None
        if recipe.family != "twin":
            other = make(Recipe(recipe.subject, recipe.seed, "twin"), out, text, updates)
            twin = [(int(step), float(nll)) for step, nll in facts_of(other)["held_out"]]
        write(recipe, train(recipe, edge, text, twin, updates), edge, path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of Multi30k; without it, the synthetic task")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--half", choices=("train", "test"))
    parser.add_argument("--part", default="1/1", help="1/2 and 2/2: two processes, each with every second subject")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.part.split("/"))
    mine, there = list(SUBJECTS)[part - 1 :: parts], {line["run"] for line in read(KEPT)}
    todo = [
        recipe
        for recipe in recipes()
        if options.half in (None, half(recipe.seed)) and recipe.subject in mine and recipe.name not in there
    ]
    for number, recipe in enumerate(todo):
        make(recipe, options.out, options.data)
        print(f"{number + 1}/{len(todo)} {recipe.name}", file=sys.stderr, flush=True)
