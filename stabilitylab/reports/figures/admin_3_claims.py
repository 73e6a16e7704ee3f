"""A claim on what Adam's updates balance: C33."""

from __future__ import annotations

import math

import numpy as np

from ..base import MissingRuns
from ..claims import Effect, Share, claim
from ..collection import Record, Runs
from ..statistics import Region
from .gains import FAIRSEQS, OWN, by_gain

DEEP = 50  # layers a side
SETTING = {OWN: " --set model.init=xavier-1", FAIRSEQS: ""}  # of a sweep
EARLY = 20  # updates over which Adam has to balance them in a deep model


@claim(
    "C33",
    figure="admin:3",
    paper="Admin",
    sentence="Adam removes the imbalance of gradients",
    source="Admin, Sec. 3.3",
    statistic="update RMS of the first over the last decoder layer of a 50L-50L Post-LN of Xavier gain 1 (without such "
    "runs of fairseq's gain, which else stand beside it), mean over updates 1-20 (of ratios, not logs: an update lost "
    "to rounding is exactly 0); printed: share of gradient entries below Adam's eps",
    threshold="R: in [1/3, 3]; X: < 1/3, as where gradients fall below Adam's eps, or > 3 (ours)",
    sweep="deepnet:4",
    after="the second X, > 3, came after the runs",
)
def adam_balances(runs: Runs) -> list[Effect | Share]:
    return by_gain(runs, _balanced)


def _balanced(runs: Runs, gain: str) -> list[Effect]:
    label = f"postln{gain}"
    deep = runs.where(kind="train", label=label, layers=(DEEP, DEEP), table="update_ratio")
    groups = deep.where(lambda run: run.updates >= EARLY).groups()
    if not groups:
        raise MissingRuns(
            f"needs a {DEEP}L-{DEEP}L {label} of {EARLY} updates with update_ratio",
            f"stabilitylab sweep --grid arch=postln depth={2 * DEEP} seed=3..7 steps={EARLY}{SETTING[gain]}",
        )
    own = groups[0].by_seed()
    ratios = {seed: _balance(record) for seed, record in own.items()}
    outside = Region(low=3) if np.mean([*ratios.values()]) > 1 else Region(high=1 / 3)
    below = [_below_eps(record) for record in own.values()]
    printed = f" ({100 * np.mean(below):.0f} % of gradient entries below eps)" if np.isfinite(below).all() else ""
    name = f"first / last decoder layer{printed}"
    return [Effect(name, ratios, Region(1 / 3, 3), outside, of=own.values())]


def _balance(record: Record) -> float:
    data = record.frame("update_ratio", ["rms"])
    data = data[(data["stack_name"] == "decoder") & (data["layer"] > 0) & (data["step"] < EARLY)]
    squares = data.assign(rms=data["rms"] ** 2).pivot_table("rms", "step", "layer", observed=True)
    ratio = np.sqrt(squares.iloc[:, 0] / squares.iloc[:, -1].replace(0.0, np.nan))
    return float(ratio.mean())


def _below_eps(record: Record) -> float:
    data = record.metrics
    if "grad_under_eps" not in data:
        return math.nan
    return float(data.loc[data["step"] < EARLY, "grad_under_eps"].mean())
