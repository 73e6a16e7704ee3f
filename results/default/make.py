#!/usr/bin/env python
"""Search the default recipe of ``stabilitylab probe`` by the rule of README.md.

    python results/default/make.py --runs FOLDER

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
CANDIDATES = ((160, 3e-4), (160, 6e-4), (240, 3e-4), (240, 6e-4))  # updates, rate
ARCHS, SEEDS = ("branchnorm", "deepnorm"), (100, 101, 102)


def worth(arch: str, seed: int, updates: int, rate: float) -> float | None:
    """Return the ``source_worth`` of a run of the ledger; None if the ledger lacks it."""
    if not LEDGER.exists():
        return None
    data = Ledger(LEDGER).frame()
    own = (data["arch"] == arch) & (data["seed"] == seed) & (data["steps"] == updates) & (data["lr"] == rate)
    found = data.loc[own, "metrics.source_worth"].to_numpy()
    return float(found[-1]) if len(found) else None


def make(arch: str, seed: int, updates: int, rate: float, runs: Path) -> None:
    """Train one run, and add it to the ledger."""
    axes = [f"arch={arch}", "depth=200", f"seed={seed}", f"lr={rate:g}"]
    where = ["--steps", str(updates), "--out", str(runs / f"{updates}"), "--ledger", str(LEDGER)]
    subprocess.run([sys.executable, "-m", "stabilitylab", "sweep", "--grid", *axes, *where], check=True)


def reads(updates: int, rate: float, runs: Path) -> bool:
    """Return True if every run of a candidate reads its source; stop at the first that does not."""
    for seed in SEEDS:
        for arch in ARCHS:
            found = worth(arch, seed, updates, rate)
            if found is None:
                make(arch, seed, updates, rate, runs)
                found = worth(arch, seed, updates, rate)
            print(f"{updates} updates at {rate:g}, {arch}, seed {seed}: source worth {found}", flush=True)
            if found is None or not found > READS_NATS:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    runs = parser.parse_args().runs
    for updates, rate in CANDIDATES:
        if reads(updates, rate, runs):
            print(f"the default: {updates} updates at {rate:g}")
            return
    print("no candidate: the default stays")


if __name__ == "__main__":
    main()
