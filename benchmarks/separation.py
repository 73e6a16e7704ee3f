"""Do the defaults show how the architectures behave? Arch x depth x seed on one data set, a process each.

    python benchmarks/separation.py --data synthetic --depths 12,200 --seeds 0,1,2 --jobs 2 --out runs/separation
    python benchmarks/separation.py --data text:train.de.gz,train.en.gz ...

Writes OUT/table.csv and prints it. Runs that have ended are not made again; interrupted ones are resumed.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from stabilitylab.errors import InputError
from stabilitylab.store import Run

ARCHS = "postln,preln,postln-init,deepnorm,branchnorm,admin"
COLUMNS = ["arch", "depth", "seed", "state", "since", "nll_gap", "accuracy_gap", "minutes", "grad_norm_last"]


def make(arch: str, depth: int, seed: int, arguments: argparse.Namespace) -> None:
    name = f"{arch}-{depth}-s{seed}"
    path = arguments.out / name
    command = [sys.executable, "-m", "stabilitylab", "probe", "-q"]
    try:
        if Run.open(path).status.state in ("finished", "diverged"):
            return
        command += ["--resume", str(path)]
    except InputError:
        command += ["--arch", arch, "--depth", str(depth), "--seed", str(seed), "--data", arguments.data]
        command += ["--out", str(arguments.out), "--name", name]
        command += [part for text in arguments.set for part in ("--set", text)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(name, result.stdout.strip() or result.stderr.strip(), file=sys.stderr, flush=True)


def row(run: Run) -> dict[str, object]:
    verdict, metrics = run.verdict, run.metrics
    assert verdict is not None
    arch, depth, seed = run.name.rsplit("-", 2)
    seconds = (metrics["tokens"] / metrics["tokens_per_second"]).sum()
    return {
        "arch": arch,
        "depth": int(depth),
        "seed": int(seed[1:]),
        "state": verdict.state,
        "since": verdict.step,
        "nll_gap": round(verdict.nll_gap, 3),
        "accuracy_gap": round(verdict.accuracy_gap, 3),
        "minutes": round(seconds / 60, 2),
        "grad_norm_last": float(f"{metrics['grad_norm_total'].dropna().iloc[-1]:.3g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--archs", default=ARCHS)
    parser.add_argument("--depths", default="12,200")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/separation"))
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    depths, seeds = ([int(n) for n in text.split(",")] for text in (arguments.depths, arguments.seeds))
    jobs = list(itertools.product(depths, seeds, arguments.archs.split(",")))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda job: make(job[2], job[0], job[1], arguments), jobs))
    runs = [Run.open(arguments.out / f"{arch}-{depth}-s{seed}") for depth, seed, arch in jobs]
    table = pd.DataFrame([row(run) for run in runs if run.verdict], columns=COLUMNS)
    table = table.sort_values(["depth", "arch", "seed"])
    table.to_csv(arguments.out / "table.csv", index=False)
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
