"""Grids of runs over warm-up and learning rate that all architectures have, and the sensitivity to the rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..collection import Record, Runs
from .comparison import comparable, failed, last_nll

AXES = ("train.warmup", "train.lr")
SLACK = 1e-6  # relative, of a rate: rounding
PAPER_WIDTH = 512  # width of the models whose learning rates the papers give
Cell = tuple[int, float]  # warm-up, learning rate


def at_width(rate: float, width: int) -> float:
    """Scale a paper's learning rate to another width: rate * 512 / width, since a narrower model bears more."""
    return rate * PAPER_WIDTH / width


def within(record: Record, rates: tuple[float, float]) -> bool:
    """Return True if the run's learning rate lies in the range of a paper's ``rates``, scaled to the run's width."""
    low, high = (at_width(rate, record.width) for rate in rates)
    return low * (1 - SLACK) <= cell(record)[1] <= high * (1 + SLACK)


def cell(record: Record) -> Cell:
    return int(record.settings[AXES[0]]), float(record.settings[AXES[1]])


@dataclass(frozen=True)
class RateGrid:
    """Comparable runs of some architectures at every one of these warm-ups and learning rates."""

    runs: Runs
    warmups: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def cells(self) -> int:
        return len(self.warmups) * len(self.rates)

    def at(self, label: str, place: Cell) -> Runs:
        return self.runs.where(lambda run: cell(run) == place, label=label)


def grids(runs: Runs) -> list[RateGrid]:
    """Find the grids among these runs, the largest first; in a grid every label has every cell."""
    found = []
    for group in comparable(runs, *AXES):
        cells = {label: {cell(run) for run in group.where(label=label)} for label in group.labels}
        wide = {label: own for label, own in cells.items() if len({lr for _, lr in own}) > 1}
        # an architecture with a stray run or two must not take the others' cells
        most = max((len(own) for own in wide.values()), default=0)
        labels = [label for label, own in wide.items() if 2 * len(own) > most]
        if not labels:
            continue
        warmups, rates = full(set.intersection(*(cells[label] for label in labels)))
        kept = group.where(lambda run, w=warmups, r=rates: cell(run)[0] in w and cell(run)[1] in r, label=labels)
        if len(rates) > 1:
            found.append(RateGrid(kept, warmups, rates))
    return sorted(found, key=lambda grid: (grid.cells, len(grid.runs.labels), len(grid.runs)), reverse=True)


def full(cells: set[Cell]) -> tuple[list[int], list[float]]:
    """Find warm-ups and rates with no cell missing among them: rows and columns with most gaps are left out first."""
    cells = set(cells)
    while True:
        rows, columns = (sorted({place[axis] for place in cells}) for axis in (0, 1))
        if len(cells) == len(rows) * len(columns):
            return [int(row) for row in rows], columns
        filled = [(count / len(columns), 0, row) for row, count in Counter(w for w, _ in cells).items()]
        filled += [(count / len(rows), 1, column) for column, count in Counter(lr for _, lr in cells).items()]
        _, axis, value = min(filled)
        cells = {place for place in cells if place[axis] != value}


def sensitivity(runs: Mapping[float, Record]) -> float:
    """Average min(loss, loss at initialisation) over learning rates, minus the least of these losses [nats/token].

    ``runs``: learning rate -> the run of one seed. The losses are held-out nll; that of a run that diverged is its loss
    at initialisation. After Wortsman et al. 2023 (2309.14322), whose rates are evenly spaced in log; here the rates are
    those of the runs.
    """
    losses = []
    for record in runs.values():
        start = float(record.held_out()["held_out_nll"].iloc[0])
        end = last_nll(record)
        losses.append(min(end, start) if math.isfinite(end) else start)
    return float(np.mean(losses) - np.min(losses))


def by_seed(grid: RateGrid, label: str, warmup: int) -> dict[int, float]:
    """Maps seed to sensitivity at one warm-up, of seeds that have all learning rates."""
    found: dict[int, dict[float, Record]] = {}
    for run in grid.runs.where(lambda run: cell(run)[0] == warmup, label=label):
        if len(run.held_out()):
            found.setdefault(run.seed, {})[cell(run)[1]] = run
    return {seed: sensitivity(own) for seed, own in sorted(found.items()) if len(own) == len(grid.rates)}


def clipped(record: Record) -> float:
    """Cut the held-out nll after training at the unigram baseline; a run that diverged or is stuck has the baseline."""
    end = math.inf if failed(record) else last_nll(record)
    return math.nan if math.isnan(end) else min(end, record.baseline)


def on_common_scale(grid: RateGrid, labels: Sequence[str]) -> dict[str, dict[int, float]]:
    """Average :func:`clipped` over the grid's cells for each label and seed, minus the least value in a cell that any
    of ``labels`` has at that seed. Only seeds with the whole grid of all labels are taken."""
    rows = by_warmup(grid, labels)
    return {label: {seed: float(np.mean([row[seed] for row in own])) for seed in own[0]} for label, own in rows.items()}


def by_warmup(grid: RateGrid, labels: Sequence[str]) -> dict[str, list[dict[int, float]]]:
    """Average as :func:`on_common_scale`, but over the rates at each warm-up; the least is that of the whole grid."""
    losses: dict[tuple[str, int], dict[Cell, float]] = {}
    for run in grid.runs.where(label=labels):
        losses.setdefault((run.label, run.seed), {})[cell(run)] = clipped(run)
    whole = {place: own for place, own in losses.items() if len(own) == grid.cells}
    seeds = [seed for seed in grid.runs.seeds if all((label, seed) in whole for label in labels)]
    least = {seed: min(min(whole[label, seed].values()) for label in labels) for seed in seeds}

    def above(label: str, seed: int, warmup: int) -> float:
        return float(np.mean([whole[label, seed][warmup, rate] for rate in grid.rates])) - least[seed]

    return {
        label: [{seed: above(label, seed, warmup) for seed in seeds} for warmup in grid.warmups] for label in labels
    }
