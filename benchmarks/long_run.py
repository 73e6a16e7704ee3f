"""A long run: rows of a 48-layer model through the real store; size, time to write a row, memory, time to read.

The tables are those of the default probes of a 48-layer decoder. Numbers are made up: a random walk in the logarithm,
as gradient norms are. `--every log` probes as the default cadence does, `--every N` each N-th row.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from stabilitylab.probes import is_due
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter

LAYERS = 48
SUBLAYERS = [Row(f"decoder.{n}.{s}", "decoder", n, s) for n in range(1, LAYERS + 1) for s in ("self_attn", "ffn")]
WHOLE = [Row(f"decoder.{n}", "decoder", n) for n in range(1, LAYERS + 1)]
TABLES = [
    Table("grad_norm", ("value", "vo_ffn", "qk", "bias", "ln"), tuple(SUBLAYERS), total="norm", phase="backward"),
    Table("activation_grad_norm", ("value",), tuple(SUBLAYERS), total="norm", phase="backward"),
    Table("ln_input", ("value", "branch", "scaled_branch", "shortcut", "p99"), tuple(SUBLAYERS), total="mean"),
    Table("cosine_similarity", ("raw", "centred"), tuple(WHOLE), total="mean", phase="reference"),
    Table("activation_sparsity", ("nonzero_fraction", "active_fraction"), tuple(WHOLE), phase="reference"),
    Table("update_ratio", ("value", "rms"), tuple(SUBLAYERS), phase="update"),
]
METRICS = ("loss", "nll", "lr", "alpha", "grad_norm_total", "tokens", "tokens_per_second", "memory_bytes")
READ = """
import json, resource, sys, time
started = time.perf_counter()
from stabilitylab.store import Run
import pandas
imported = time.perf_counter()
run = Run.open(sys.argv[1])
status = run.status
opened = time.perf_counter()
rows = len(run.metrics)
metrics = time.perf_counter()
cells = len(run.frame("grad_norm", columns=["value"]))
table = time.perf_counter()
print(json.dumps({"open": opened - imported, "metrics": metrics - opened, "one column of a table": table - metrics,
                  "rows": rows, "cells": cells, "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}))
"""


def write(path: Path, rows: int, every: int | str, part: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    levels = {table.name: random.normal(size=(len(table.rows), len(table.columns))) for table in TABLES}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent, probed = 0.0, 0
    with RunWriter.create(path, {"label": "long", "config": {}}) as run:
        run.open(TABLES)
        for step in range(rows):
            cells = {}
            if is_due(step, every):
                probed += 1
                for table in TABLES:
                    levels[table.name] += 0.05 * random.normal(size=levels[table.name].shape)
                    cells[table.name] = Cells(np.exp(levels[table.name]), np.zeros(len(table.rows), bool))
            numbers = dict(zip(METRICS, random.normal(size=len(METRICS)).tolist(), strict=True))
            started = time.perf_counter()
            run.begin(step, {"loss": numbers["loss"]}, {})
            run.append(step, numbers, cells)
            if step % part == part - 1:
                run.seal()
            spent += time.perf_counter() - started
    run.set_status("finished", rows, "made up")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"probed": probed, "ms a row": 1000 * spent / rows, "MiB of the writer": (after - before) / 2**10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--every", default="log")
    parser.add_argument("--part", type=int, default=5000, help="rows between checkpoints, which end a part")
    options = parser.parse_args()
    every = options.every if options.every == "log" else int(options.every)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "long"
        wrote = write(path, options.rows, every, options.part)
        files = [file for file in path.rglob("*") if file.is_file()]
        read = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "stabilitylab", "verify", "-q", str(path)], check=True)
        facts = {
            "rows": options.rows,
            "every": options.every,
            **{key: round(value, 3) for key, value in wrote.items()},
            "MB on disk": round(sum(file.stat().st_size for file in files) / 1e6, 1),
            "files": len(files),
            "read": {key: round(value, 3) for key, value in json.loads(read.stdout).items()},
            "verify [s]": round(time.perf_counter() - started, 1),
        }
        print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
