#!/usr/bin/env python
"""Makes six random runs of the corpus again, with their twins, and compares them with the committed features.

python results/alarm/again.py --data PATH/multi30k [--runs 6] [--seed 0]    # about two minutes a run

Equal means equal, number by number: on the processor's instruction set and the torch that runs.csv names. On others a
run that fails goes its own way after some hundred updates, so that nothing is compared there. Exits with 1 where one
differs, with 2 where nothing can be compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from corpus import HERE, CorpusRun, lines, read
from keep import small

sys.path.append(str(HERE.parents[1] / "benchmarks" / "faults"))

from families import UPDATES
from make import make
from recipes import recipes


def comparable(told: Mapping[str, str]) -> bool:
    return told["cpu"] == torch.backends.cpu.get_cpu_capability() and told["torch"] == torch.__version__


def differing(run: CorpusRun, path: Path) -> list[str]:
    """The columns of the file that are not the committed ones; one name for another number of rows."""
    table = pq.read_table(path)
    if table.num_rows != run.rows:
        return ["rows"]
    return [
        name
        for name in table.column_names
        if not np.array_equal(small(name, table[name].to_numpy()).astype(float), run.columns[name], equal_nan=True)
    ]


def again(
    told: Sequence[Mapping[str, str]], text: Path | None, out: Path, folder: Path = HERE, updates: int = UPDATES
) -> dict[str, list[str]]:
    """run -> what differs."""
    out.mkdir(parents=True, exist_ok=True)
    known = {run.name: run for half in {line["half"] for line in told} for run in read(half, folder)}
    known_recipes = {recipe.name: recipe for recipe in recipes()}
    found = {}
    for line in told:
        run = known[line["run"]]
        found[run.name] = differing(run, make(known_recipes[run.name], out, text, updates))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    options = parser.parse_args()
    told = [line for line in lines() if comparable(line)]
    if not told:
        print("nothing to compare: no run of the corpus is of this processor's instruction set and this torch.")
        return 2
    chosen = random.Random(options.seed).sample(told, min(options.runs, len(told)))
    with tempfile.TemporaryDirectory() as folder:
        found = again(chosen, options.data, Path(folder))
    for name, columns in found.items():
        print(f"{name}: {'equal' if not columns else 'differs in ' + ', '.join(columns)}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
