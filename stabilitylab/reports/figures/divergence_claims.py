"""Claims on what Adam's updates balance: C32 and C33."""

from __future__ import annotations

import math

import numpy as np

from ..base import MissingRuns
from ..claims import Effect, claim
from ..collection import Record, Runs
from ..statistics import Region, signed_rank

DEEP = 50  # layers a side
SETTLED = 500  # updates after which gradients and updates are compared
EARLY = 20  # updates over which Adam has to balance them in a deep model


def _updates(record: Record) -> int:
    return int(record.settings.get("train.steps", 0))


@claim(
    "C32",
    figure="admin:3",
    paper="Admin",
    sentence="Gradients of different parameters range widely, Adam's updates do not",
    source="Admin, Fig. 5",
    statistic="log10(p95 / p5) over sub-layers of the gradient norm minus that of the update's RMS, means over the "
    "probed steps of the run's second half, Post-LN of 500 updates or more; the paper compares parameter tensors, and "
    "an epoch's change of the weights, of which single updates are the part recorded here",
    threshold="R: > 1 decade; X: < 0 (the plan names no X: ours)",
    sweep="branchnorm:8",
)
def updates_are_narrow(runs: Runs) -> list[Effect]:
    def fit(run: Record) -> bool:
        return _updates(run) >= SETTLED and run.verdict != "diverged"

    groups = runs.where(fit, kind="train", label="postln", table=("grad_norm", "update_ratio")).groups()
    if not groups:
        raise MissingRuns(f"needs postln trained for {SETTLED} updates or more with grad_norm and update_ratio")
    found = {
        seed: _decades(record, "grad_norm", "value") - _decades(record, "update_ratio", "rms")
        for seed, record in groups[0].by_seed().items()
    }
    return [Effect("decades wider", found, Region(low=1), Region(high=0), p=signed_rank([*found.values()]))]


def _decades(record: Record, table: str, column: str) -> float:
    """log10(p95 / p5) over the sub-layers of all layers, which have about equally many entries."""
    data = record.frame(table, [column])
    data = data[(data["layer"] > 0) & (data["step"] >= data["step"].max() / 2)]
    with np.errstate(divide="ignore", invalid="ignore"):  # a sub-layer that never moves is infinitely far below
        logs = np.log10(data.groupby("site", observed=True)[column].mean().to_numpy())
        low, high = np.percentile(logs, (5, 95))
        return float(high - low)


@claim(
    "C33",
    figure="admin:3",
    paper="Admin",
    sentence="Adam removes the imbalance of gradients",
    source="Admin, Sec. 3.3",
    statistic="update RMS of the first over the last decoder layer of a 50L-50L Post-LN, mean over updates 1-20 (of "
    "ratios, not logs: an update lost to rounding is exactly 0); printed: share of gradient entries below Adam's eps",
    threshold="R: in [1/3, 3]; X: < 1/3, as where gradients fall below Adam's eps",
    sweep="deepnet:4",
)
def adam_balances(runs: Runs) -> list[Effect]:
    deep = runs.where(kind="train", label="postln", layers=(DEEP, DEEP), table="update_ratio")
    groups = deep.where(lambda run: _updates(run) >= EARLY).groups()
    if not groups:
        raise MissingRuns(
            f"needs a {DEEP}L-{DEEP}L postln of {EARLY} updates with update_ratio",
            f"stabilitylab sweep --grid arch=postln depth={2 * DEEP} seed=3..7 steps={EARLY}",
        )
    own = groups[0].by_seed()
    effects = [Effect("first / last decoder layer", {s: _balance(r) for s, r in own.items()}, Region(1 / 3, 3),
                      Region(high=1 / 3))]  # fmt: skip
    below = {seed: _below_eps(record) for seed, record in own.items()}
    if all(math.isfinite(share) for share in below.values()):
        effects.append(Effect("entries below eps", below, Region()))
    return effects


def _balance(record: Record) -> float:
    data = record.frame("update_ratio", ["rms"])
    data = data[(data["stack"] == "decoder") & (data["layer"] > 0) & (data["step"] < EARLY)]
    squares = data.assign(rms=data["rms"] ** 2).pivot_table("rms", "step", "layer", observed=True)
    ratio = np.sqrt(squares.iloc[:, 0] / squares.iloc[:, -1].replace(0.0, np.nan))
    return float(ratio.mean())


def _below_eps(record: Record) -> float:
    data = record.metrics
    if "grad_under_eps" not in data:
        return math.nan
    return float(data.loc[data["step"] < EARLY, "grad_under_eps"].mean())
