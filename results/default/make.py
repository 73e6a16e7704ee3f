#!/usr/bin/env python
"""Search the default recipe of ``stabilitylab probe`` by the rule of README.md.

    python results/default/make.py --runs FOLDER [--depth 36 | --slow]

Runs that ledger.csv has are not made again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stabilitylab.sweep import Ledger
from stabilitylab.verdict import READS_NATS

LEDGER = Path(__file__).with_name("ledger.csv")
CANDIDATES = {  # depth -> (updates, rate), in the order of the rule
    200: ((160, 3e-4), (160, 6e-4), (240, 3e-4), (240, 6e-4)),
    36: ((160, 3e-4), (160, 1e-3), (320, 3e-4), (320, 1e-3), (600, 3e-4), (600, 1e-3)),
}
SLOW = ((240, 3e-4), (240, 6e-4), (240, 1e-3))  # of 200 layers, with a warm-up of half the run
ARCHS, SEEDS = ("branchnorm", "deepnorm"), (100, 101, 102)
WARMUP = 40  # updates, of all candidates but the slow ones; the former default


@dataclass(frozen=True)
class Candidate:
    """A recipe of the rule."""

    updates: int
    rate: float
    depth: int = 200
    warmup: int = WARMUP

    def worth(self, arch: str, seed: int) -> float | None:
        """Return the ``source_worth`` of a run of the ledger; None if the ledger lacks it."""
        if not LEDGER.exists():
            return None
        data = Ledger(LEDGER).frame()
        own = (data["arch"] == arch) & (data["seed"] == seed) & (data["steps"] == self.updates)
        own &= (data["lr"] == self.rate) & (data["layers"] == self.depth) & (data["warmup"] == self.warmup)
        found = data.loc[own, "metrics.source_worth"].to_numpy()
        return float(found[-1]) if len(found) else None

    def make(self, arch: str, seed: int, runs: Path) -> None:
        """Train one run, and add it to the ledger."""
        axes = [f"arch={arch}", f"depth={self.depth}", f"seed={seed}", f"lr={self.rate:g}", f"warmup={self.warmup}"]
        folder = runs / (f"{self.updates}" if self.depth == 200 else f"{self.depth}-{self.updates}")
        where = ["--steps", str(self.updates), "--out", str(folder), "--ledger", str(LEDGER)]
        subprocess.run([sys.executable, "-m", "stabilitylab", "sweep", "--grid", *axes, *where], check=True)

    def reads(self, runs: Path, archs: Sequence[str] = ARCHS) -> bool:
        """Return True if every run reads its source; stop at the first that does not."""
        for seed in SEEDS:
            for arch in archs:
                found = self.worth(arch, seed)
                if found is None:
                    self.make(arch, seed, runs)
                    found = self.worth(arch, seed)
                print(f"{self}, {arch}, seed {seed}: source worth {found}", flush=True)
                if found is None or not found > READS_NATS:
                    return False
        return True

    def __str__(self) -> str:
        return f"{self.updates} updates at {self.rate:g}, warm-up of {self.warmup}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run directories")
    parser.add_argument("--depth", type=int, choices=[*CANDIDATES], default=200, help="layers of both stacks together")
    parser.add_argument("--slow", action="store_true", help="200 layers with a warm-up of half the run")
    given = parser.parse_args()
    if given.slow and given.depth != 200:
        parser.error("--slow is about 200 layers")
    what = "the default" if given.depth == 200 else f"{given.depth} layers"
    rule = [Candidate(updates, rate, given.depth) for updates, rate in CANDIDATES[given.depth]]
    if given.slow:
        rule = [Candidate(updates, rate, warmup=updates // 2) for updates, rate in SLOW]
    for candidate in rule:
        if candidate.reads(given.runs, ARCHS[::-1] if given.slow else ARCHS):
            print(f"{what}: {candidate}")
            return
    print("no candidate: the default stays" if given.depth == 200 else f"no candidate of {given.depth} layers reads")


if __name__ == "__main__":
    main()
