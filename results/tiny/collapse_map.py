#!/usr/bin/env python
"""Draws the map of collapse from its committed table, and answers P5, the question that is asked of it.

python results/tiny/collapse_map.py      # figures/collapse-map, and the answer

A depth is drawn and judged when all of its runs are in, so that nobody sees a part of it before. ``recompute.py`` takes
its tables in docs/results.md from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import judge
import pandas as pd
from cells import HERE
from page_blocks import table

from stabilitylab.experiments import experiments, protocol
from stabilitylab.reports import paper
from stabilitylab.reports.figures.collapse.map import (
    GRID,
    MapTrial,
    drawn,
    largest_reading_rate,
    outcome,
    row_title,
    trial,
)

TABLE, LEDGER = HERE / "map" / "reading_course.csv", HERE / "map" / "ledger.csv"
RUN = ["arm", "layers", "warmup", "T", "lr", "seed"]
RAMP = 240  # T and warm-up at which P5 is asked: 4 % of the schedule, as in the comparison


def trials() -> list[MapTrial]:
    """The runs that are in."""
    known = pd.read_csv(LEDGER).query("verdict == 'diverged'")
    lost = {
        (line.label, line.layers // 2, line.warmup, line.T, line.lr, line.seed)
        for line in known.itertuples(index=False)
    }
    found = []
    for run, course in pd.read_csv(TABLE).groupby(RUN):
        arm, layers, warmup, T, rate, seed = run
        one = trial(
            course, label=arm, layers=layers, warmup=warmup, T=T, rate=rate, seed=seed, diverged=run in lost
        )  # fmt: skip
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


def whole(every: Iterable[MapTrial]) -> dict[int, tuple[int, int, list[MapTrial]]]:
    """Layers a side -> runs that are in, runs of the plan, and the trials: none as long as runs are missing."""
    found = {}
    for layers in GRID:
        own, of = [one for one in every if one.layers == layers], planned(layers)
        found[layers] = (len(own), of, own if len(own) == of else [])
    return found


def answers() -> list[str]:
    """P5 at each depth."""
    rows = []
    for layers, (count, of, known) in whole(trials()).items():
        rows.append((layers, f"{count} of {of}", question(known, layers).said() if known else "open"))
    return table(("layers a side", "runs that are in", "P5"), rows)


def outcomes() -> list[str]:
    """The cells of the depths that are whole, in the words of the figure."""
    known = [one for _, _, own in whole(trials()).values() for one in own]
    if not known:
        return ["No depth is complete yet."]
    rates, rows = sorted({one.rate for one in known}), []
    for (layers, warmup, row), own in groupby(sorted(known, key=_line), key=_line):
        found = [*own]
        at_rates = (", ".join(outcome([one for one in found if one.rate == rate])) for rate in rates)
        rows.append((layers, warmup, row_title(row), *at_rates))
    return table(("layers a side", "warm-up [updates]", "arm", *(f"{rate:g}" for rate in rates)), rows)


def _line(one: MapTrial) -> tuple[int, int, tuple[str, int]]:
    return one.layers, one.warmup, one.row


def main() -> None:
    found = whole(trials())
    for layers, (count, of, known) in found.items():
        said = question(known, layers).said() if known else f"open: {count} of {of} runs are in"
        print(f"P5 at {layers} layers a side: {said}")
    known = [one for _, _, own in found.values() for one in own]
    if not known:
        return
    told = "64 wide, text data, the beginning of a schedule of 6,000 updates"
    picture = drawn(known, f"{len(known)} runs of Multi30k, German to English", told)
    paper.write(picture, HERE / "figures", "collapse-map")
    print(picture.finding)


if __name__ == "__main__":
    main()
