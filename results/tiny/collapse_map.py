#!/usr/bin/env python
"""Draws the map of collapse from its committed table, and answers P5, the question that is asked of it.

python results/tiny/collapse_map.py      # figures/collapse-map, and the answer
"""

from __future__ import annotations

from collections.abc import Iterable

import judge
import pandas as pd
from cells import HERE

from stabilitylab.experiments import protocol
from stabilitylab.reports import paper
from stabilitylab.reports.figures.collapse.map import GRID, MapTrial, drawn, largest_reading_rate, trial

TABLE = HERE / "map" / "reading_course.csv"
RUN = ["arm", "layers", "warmup", "T", "lr", "seed"]
RAMP = 240  # T and warm-up at which P5 is asked: 4 % of the schedule, as in the comparison


def trials() -> list[MapTrial]:
    """The runs that are in."""
    found = []
    for (arm, layers, warmup, T, rate, seed), course in pd.read_csv(TABLE).groupby(RUN):
        row = (protocol.BRANCH, int(T)) if arm.startswith(protocol.BRANCH) else (arm, 0)
        one = trial(course, layers=int(layers), warmup=int(warmup), row=row, rate=float(rate), seed=int(seed))
        if one is None:
            raise SystemExit(f"{TABLE}: {arm} at {rate:g}, seed {seed}, was not measured when it is judged.")
        found.append(one)
    return found


def largest(known: Iterable[MapTrial], layers: int) -> dict[str, dict[int, float]]:
    """Arm of P5 -> seed -> the largest rate up to which its model reads; 0 where it reads at none."""
    found = {}
    for arm, row in ((protocol.BRANCH, (protocol.BRANCH, RAMP)), (protocol.DEEP, (protocol.DEEP, 0))):
        own = [one for one in known if one.place == (layers, RAMP) and one.row == row]
        rates = largest_reading_rate(own)
        found[arm] = {seed: rates.get(seed, 0.0) for seed in sorted({one.seed for one in own})}
    return found


def question(known: Iterable[MapTrial], layers: int) -> judge.Largest:
    """P5 at ``layers`` a side."""
    rates, *_ = GRID[layers]
    return judge.largest_rates(largest(known, layers), rates)


def planned(layers: int) -> int:
    """The number of runs of the map at ``layers`` a side."""
    rates, ramps, warmups, seeds = GRID[layers]
    return len(rates) * (len(ramps) + 1) * len(warmups) * seeds


def main() -> None:
    known = trials()
    told = "64 wide, text data, the beginning of a schedule of 6,000 updates"
    picture = drawn(known, f"{len(known)} runs of Multi30k, German to English", told)
    paper.write(picture, HERE / "figures", "collapse-map")
    print(picture.finding)
    for layers in GRID:
        own = sum(one.layers == layers for one in known)
        said = question(known, layers).said() if own == planned(layers) else "open"
        print(f"P5 at {layers} layers a side ({own} of {planned(layers)} runs are in): {said}")


if __name__ == "__main__":
    main()
