"""The distance by which one update of a group of parameters moves the output, and its growth with depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...experiments import command
from ..base import MissingRuns
from ..claims import Effect
from ..collection import LAYERS, Record, Runs
from ..statistics import Region, slope
from .quality import even


def rate(record: Record, optimizer: str, group: str) -> float:
    """Reads ||F(theta - lr u) - F(theta)|| / lr per token for one update of ``group`` at lr = 1e-6; NaN if not
    measured."""
    data = record.at("update_rate", 0, ["value"])
    found = data.loc[data["site"] == f"{optimizer}.{group}", "value"].to_numpy(float)
    return float(found[0]) if len(found) else math.nan


def one_step_runs(runs: Runs) -> Runs:
    """Pick the richest group of one-step runs, of stacks that are equally deep, that differ only in depth, architecture
    and seed."""
    groups = runs.where(even, kind="onestep", table="update_rate").groups(*LAYERS)
    if not groups:
        raise MissingRuns("no one-step run with update_rate", command("deepnet:5"))
    return max(groups, key=lambda g: (len(g.depths), len(g.labels), len(g)))


def exponents(runs: Runs, optimizer: str, group: str, depths: Iterable[int]) -> dict[int, float]:
    """Fit the exponent k of rate ~ N^k for each seed, over those ``depths`` that it has; seeds with a single depth or
    with a rate that is not positive are left out."""
    found = {}
    for seed in runs.seeds:
        own = {run.depth: rate(run, optimizer, group) for run in runs.where(seed=seed) if run.depth in set(depths)}
        if len(own) > 1 and all(value > 0 for value in own.values()):
            found[seed] = slope([math.log(n) for n in own], [math.log(value) for value in own.values()])
    return found


def largest_by_seed(runs: Runs, value: Callable[[Record], float]) -> dict[int, float]:
    """Map seed to the largest value over all its depths; NaN if one of them is."""
    found: dict[int, float] = {}
    for record in runs:
        found[record.seed] = float(np.maximum(found.get(record.seed, -math.inf), value(record)))
    return found


def of_label(runs: Runs, label: str) -> Runs:
    """Picks the runs of one label among :func:`one_step_runs`; raises MissingRuns where there are none."""
    found = one_step_runs(runs).where(label=label)
    if not found:
        raise MissingRuns(f"needs one-step runs of {label}")
    return found


def growth(
    name: str,
    runs: Runs,
    label: str,
    optimizer: str,
    group: str,
    depths: Sequence[int],
    reproduced: Region | None = None,
    contradicted: Region | None = None,
) -> Effect:
    """Fit the exponent of N in ||dF|| / lr of one update of ``group``, seed by seed, over these depths."""
    own = of_label(runs, label).where(lambda run: run.depth in depths)
    found = exponents(own, optimizer, group, depths)
    if not found:
        raise MissingRuns(f"needs one-step runs of {label} at several depths from {min(depths)} to {max(depths)}")
    return Effect(name, found, reproduced, contradicted, of=own)
