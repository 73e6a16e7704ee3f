"""A ranking held against runs that were trained to an end: how much did the cheap probes tell of what happened?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from scipy import stats

from ..errors import InputError
from ..reports.collection import Record, Runs
from ..reports.stability import COUNTS, stability_table
from ..store.layout import flat
from .columns import COLUMNS, Column
from .measurement import Measurement
from .ranking import ranking, ranks

LEAST = 5  # architectures below which no correlation is given
UNRANKED = ("seconds", "parameters")  # which no paper takes for stability
OF_TRAINING = ("seed", "device", "threads", "cuda_graphs", "compile", "one_pass", "parallel")
FREE = {"data.seed", *(f"train.{key}" for key in OF_TRAINING)}


@dataclass(frozen=True)
class Agreement:
    """Spearman's ``rho`` of a predicted order with how runs ended, 1 being the same order, and its 95 % interval over
    architectures; NaN where one of both orders is a single tie."""

    name: str
    rho: float
    low: float
    high: float


@dataclass(frozen=True)
class Check:
    """``agreements`` of the ranking and of each column alone; ``real``: architecture -> its rank by how its runs ended.

    ``reliability``: mean rho between the orders that two single seeds of the real runs give, which a prediction can
    hardly exceed; NaN with one seed. ``states``: how many of these runs ended how.
    """

    agreements: tuple[Agreement, ...]
    real: Mapping[str, float]
    reliability: float
    seeds: int
    states: Mapping[str, int]


def check(measurements: Sequence[Measurement], runs: Runs) -> Check:
    """Hold the ranking of ``measurements`` against those of ``runs`` that have their settings; seeds may differ.

    Raises InputError where fewer than five architectures are in both.
    """
    fit = alike(measurements, runs)
    table = {str(row["arch"]): row for row in stability_table(fit).to_dict("records")}
    if len(table) < LEAST:
        raise InputError(
            f"of the runs to check against, those of {len(table)} architectures have ended with this depth, data and "
            f"recipe, and {LEAST} are needed: train them, or ask for what the runs have."
        )
    real = real_ranks(table)
    own = [one for one in measurements if one.arch in real]
    places = ranking(own)
    orders = {"the ranking": {one.arch: float(one.place) for one in places}}
    orders |= {column.title: mean_ranks(own, column) for column in COLUMNS if column.name not in UNRANKED}
    return Check(
        agreements=tuple(agreement(name, order, real) for name, order in orders.items()),
        real=real,
        reliability=reliability(fit, [*real]),
        seeds=max(int(row["seeds"]) for row in table.values()),
        states={state: sum(int(row[column]) for row in table.values()) for state, column in COUNTS.items()},
    )


def alike(measurements: Sequence[Measurement], runs: Runs) -> Runs:
    """The runs whose settings are those of a measurement of the same label: all that both record, but seeds and device.

    A label includes controls, and an architecture's own recipe is part of its measurement.
    """
    wanted = {one.arch: dict(flat(one.config)) for one in measurements}

    def same(record: Record) -> bool:
        own = wanted.get(record.label)
        return own is not None and all(
            record.settings.get(key, value) == value for key, value in own.items() if key not in FREE
        )

    return runs.where(same, kind="train")


def real_ranks(table: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Architecture -> rank by its row of the stability table, 1 the best; ties share their mean.

    State first: the share of seeds that diverged, then of those that are stuck, then the mean distance from the
    unigram baseline. Those of which no seed left the plateau are tied: a distance there is noise.
    """
    ends = {}
    for arch, row in table.items():
        failed = row["stuck"] + row["diverged"] == row["seeds"]
        ends[arch] = (row["diverged"] / row["seeds"], row["stuck"] / row["seeds"], 0.0 if failed else row["nll_gap"])
    place = {end: number for number, end in enumerate(sorted(set(ends.values())))}
    return dict(zip(ends, stats.rankdata([place[end] for end in ends.values()]).tolist(), strict=True))


def mean_ranks(measurements: Sequence[Measurement], column: Column) -> dict[str, float]:
    """Architecture -> mean over seeds of its rank in one column; where none is better, the smaller number is first."""
    seeds = sorted({one.seed for one in measurements})
    by_seed = [ranks([one for one in measurements if one.seed == seed], column) for seed in seeds]
    return {arch: fmean(found[arch] for found in by_seed if arch in found) for arch in by_seed[0]}


def agreement(name: str, predicted: Mapping[str, float], real: Mapping[str, float]) -> Agreement:
    """Spearman's rho with its interval by Fisher's z and the variance (1 + rho^2 / 2) / (n - 3) of Bonett and Wright
    (2000)."""
    pairs = [(predicted[arch], real[arch]) for arch in real]
    if any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return Agreement(name, math.nan, math.nan, math.nan)
    one, other = zip(*pairs, strict=True)
    rho = float(stats.spearmanr(one, other).statistic)  # pyright: ignore[reportAttributeAccessIssue]
    if abs(rho) > 1 - 1e-12:
        return Agreement(name, rho, rho, rho)
    half = float(stats.norm.ppf(0.975)) * math.sqrt((1 + rho**2 / 2) / (len(pairs) - 3))
    return Agreement(name, rho, math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half))


def reliability(runs: Runs, archs: Sequence[str]) -> float:
    """Mean rho between the orders that the real runs give with one seed and with another."""
    orders = []
    for seed in sorted({record.seed for record in runs}):
        rows = stability_table(runs.where(lambda record, seed=seed: record.seed == seed)).to_dict("records")
        table = {str(row["arch"]): row for row in rows}
        if set(archs) <= set(table):
            orders.append(real_ranks(table))
    rhos = [agreement("", one, other).rho for one, other in combinations(orders, 2)]
    return fmean(rhos) if rhos else math.nan
