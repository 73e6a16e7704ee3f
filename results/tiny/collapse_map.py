#!/usr/bin/env python
"""Draws the map of collapse from its committed table, and answers P5, the question that is asked of it.

python results/tiny/collapse_map.py      # figures/collapse-map, and the answer

A depth is drawn and judged when all of its runs are in, so that nobody sees a part of it before.
"""

from __future__ import annotations

from collections.abc import Iterable

import judge
import pandas as pd
from cells import HERE

from stabilitylab.experiments import experiments, protocol
from stabilitylab.reports import paper
from stabilitylab.reports.figures.collapse.map import GRID, MapTrial, drawn, largest_reading_rate, trial

TABLE = HERE / "map" / "reading_course.csv"
RUN = ["arm", "layers", "warmup", "T", "lr", "seed"]
RAMP = 240  # T and warm-up at which P5 is asked: 4 % of the schedule, as in the comparison


def trials() -> list[MapTrial]:
    """The runs that are in."""
    found = []
    for (arm, layers, warmup, T, rate, seed), course in pd.read_csv(TABLE).groupby(RUN):
        one = trial(course, label=arm, layers=layers, warmup=warmup, T=T, rate=rate, seed=seed)
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
    return sum(one.config.model.encoder_layers == layers for one in experiments("collapse:map", "tiny"))


def main() -> None:
    every = trials()
    counts = {layers: (sum(one.layers == layers for one in every), planned(layers)) for layers in GRID}
    known = [one for one in every if counts[one.layers][0] == counts[one.layers][1]]
    for layers, (count, whole) in counts.items():
        said = question(known, layers).said() if count == whole else f"open: {count} of {whole} runs are in"
        print(f"P5 at {layers} layers a side: {said}")
    if not known:
        return
    told = "64 wide, text data, the beginning of a schedule of 6,000 updates"
    picture = drawn(known, f"{len(known)} runs of Multi30k, German to English", told)
    paper.write(picture, HERE / "figures", "collapse-map")
    print(picture.finding)


if __name__ == "__main__":
    main()
