"""TODO"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ...experiments import command
from ..base import MissingRuns
from ..collection import LAYERS, Record, Runs
from ..statistics import slope


def rate(record: Record, optimizer: str, group: str) -> float:
    """||F(theta - lr u) - F(theta)|| / lr per token for one update of ``group`` at lr = 1e-6; NaN if not measured."""
    data = record.at("update_rate", 0, ["value"])
    found = data.loc[data["site"] == f"{optimizer}.{group}", "value"].to_numpy(float)
    return float(found[0]) if len(found) else math.nan


def one_step_runs(runs: Runs) -> Runs:
    """The richest group of one-step runs that differ in depth, architecture and seed alone."""
    groups = runs.where(kind="onestep", table="update_rate").groups(*LAYERS)
    if not groups:
        raise MissingRuns("no one-step run with update_rate", command("deepnet:5"))
    return max(groups, key=lambda g: (len(g.depths), len(g.labels), len(g)))


def exponents(runs: Runs, optimizer: str, group: str, depths: Iterable[int]) -> dict[int, float]:
    """Seed -> exponent k of rate ~ N^k, fitted over those ``depths`` that the seed has; two at least."""
    found = {}
    for seed in runs.seeds:
        own = {run.depth: rate(run, optimizer, group) for run in runs if run.seed == seed and run.depth in set(depths)}
        if len(own) > 1 and all(value > 0 for value in own.values()):
            found[seed] = slope([math.log(n) for n in own], [math.log(value) for value in own.values()])
    return found


def largest_by_seed(runs: Runs, value: Callable[[Record], float]) -> dict[int, float]:
    """Seed -> the largest value over all its depths."""
    found: dict[int, float] = {}
    for record in runs:
        found[record.seed] = max(found.get(record.seed, -math.inf), value(record))
    return found
