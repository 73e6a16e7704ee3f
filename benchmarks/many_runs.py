"""How long `runs`, `compare`, `report`, `claims` and `verify` take over a folder of many runs.

Small finished runs (made-up numbers, 6L-6L, 64 rows) are written through the real store; then each command runs as a
user would run it, in a process of its own. Prints a line a command: wall time, CPU time, peak memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from timing import command

from stabilitylab.config import resolve
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import RunWriter

ARCHS = ("postln", "preln", "deepnorm", "branchnorm", "admin")
LAYERS, STEPS = 6, 64
PLACES = [
    Row(f"{stack}.{n}.{sublayer}", stack, n, sublayer)
    for stack in ("encoder", "decoder")
    for n in range(1, LAYERS + 1)
    for sublayer in ("self_attn", "ffn")
]
TABLES = [
    Table("grad_norm", ("value",), tuple(PLACES), "L2 norm", "", "norm", "backward", log=True),
    Table("ln_input", ("value",), tuple(PLACES), "L2 norm per token", "", "mean", "forward", log=True),
]


def write_run(path: Path, arch: str, seed: int) -> None:
    settings = {"model": {"arch": arch}, "train": {"steps": STEPS, "seed": seed}, "data": {"seed": seed}}
    config = resolve(settings, depth=2 * LAYERS)
    random = np.random.default_rng(seed)
    manifest = {
        "label": arch,
        "config": config.model_dump(mode="json"),
        "unigram": {"cross_entropy": 6.0, "accuracy": 0.1},
    }
    with RunWriter.create(path, manifest) as run:
        run.open(TABLES)
        for step in range(STEPS + 1):
            shape = (len(PLACES), 1)
            cells = {t.name: Cells(np.exp(random.normal(size=shape)), np.zeros(shape[0], bool)) for t in TABLES}
            loss = 7.0 - 3.0 * step / STEPS + 0.01 * float(random.normal())
            numbers = {"loss": loss, "nll": loss, "held_out_nll": loss, "held_out_accuracy": 0.2, "lr": 3e-4}
            run.append(step, {**numbers, "grad_norm_total": 1.0}, cells if step % 8 == 0 else {})
    run.set_status("finished", STEPS, "made up")


def timed(*arguments: str) -> None:
    """Run a command, and print a line about it."""
    used = command(*arguments)
    print(f"| `{arguments[0]}` | {used.wall:.1f} | {used.cpu:.1f} | {used.memory:.0f} | {used.code} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "runs"
        paths = []
        for place in range(options.runs):
            arch, seed = ARCHS[place % len(ARCHS)], 3 + place // len(ARCHS)
            paths.append(folder / f"{arch}-s{seed}")
            write_run(paths[-1], arch, seed)
        print(f"{options.runs} run directories of {STEPS + 1} rows; memory is the peak of the process")
        print("| command | wall [s] | CPU [s] | memory [MiB] | exit |\n|---|---|---|---|---|")
        timed("runs", str(folder))
        timed("verify", "-q", str(folder))
        timed("claims", str(folder), "-q")
        timed("compare", *map(str, paths))
        timed("report", str(folder), "--out", f"{scratch}/report", "-q")


if __name__ == "__main__":
    main()
