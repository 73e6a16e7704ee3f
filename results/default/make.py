#!/usr/bin/env python
"""Search the default recipe of ``stabilitylab probe`` by the rule of README.md.

    python results/default/make.py --runs FOLDER [--depth 36]

Runs that ledger.csv has are not made again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from stabilitylab.sweep import Ledger
from stabilitylab.verdict import READS_NATS

LEDGER = Path(__file__).with_name("ledger.csv")
CANDIDATES = {  # depth -> (updates, rate), in the order of the rule
    200: ((160, 3e-4), (160, 6e-4), (240, 3e-4), (240, 6e-4)),
    36: ((160, 3e-4), (160, 1e-3), (320, 3e-4), (320, 1e-3), (600, 3e-4), (600, 1e-3)),
}
ARCHS, SEEDS = ("branchnorm", "deepnorm"), (100, 101, 102)


def worth(arch: str, seed: int, updates: int, rate: float, depth: int = 200) -> float | None:
    """Return the ``source_worth`` of a run of the ledger; None if the ledger lacks it."""
    if not LEDGER.exists():
        return None
    data = Ledger(LEDGER).frame()
    own = (data["arch"] == arch) & (data["seed"] == seed) & (data["steps"] == updates) & (data["lr"] == rate)
    own &= data["layers"] == depth
    found = data.loc[own, "metrics.source_worth"].to_numpy()
    return float(found[-1]) if len(found) else None


def make(arch: str, seed: int, updates: int, rate: float, runs: Path, depth: int = 200) -> None:
    """Train one run, and add it to the ledger."""
    axes = [f"arch={arch}", f"depth={depth}", f"seed={seed}", f"lr={rate:g}"]
    folder = runs / (f"{updates}" if depth == 200 else f"{depth}-{updates}")
    where = ["--steps", str(updates), "--out", str(folder), "--ledger", str(LEDGER)]
    subprocess.run([sys.executable, "-m", "stabilitylab", "sweep", "--grid", *axes, *where], check=True)


def reads(updates: int, rate: float, runs: Path, depth: int = 200) -> bool:
    """Return True if every run of a candidate reads its source; stop at the first that does not."""
    for seed in SEEDS:
        for arch in ARCHS:
            found = worth(arch, seed, updates, rate, depth)
            if found is None:
                make(arch, seed, updates, rate, runs, depth)
                found = worth(arch, seed, updates, rate, depth)
            print(f"{updates} updates at {rate:g}, {arch}, seed {seed}: source worth {found}", flush=True)
            if found is None or not found > READS_NATS:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--depth", type=int, choices=[*CANDIDATES], default=200, help="layers of both stacks together")
    given = parser.parse_args()
    what = "the default" if given.depth == 200 else f"{given.depth} layers"
    for updates, rate in CANDIDATES[given.depth]:
        if reads(updates, rate, given.runs, given.depth):
            print(f"{what}: {updates} updates at {rate:g}")
            return
    print("no candidate: the default stays" if given.depth == 200 else f"no candidate of {given.depth} layers reads")


if __name__ == "__main__":
    main()
