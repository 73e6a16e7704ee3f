"""Claims on what Adam's updates balance, and on who diverges: C32 to C35."""

from __future__ import annotations

import math

import numpy as np

from ..base import MissingRuns
from ..claims import Effect, Share, claim
from ..collection import Record, Runs
from ..statistics import Region
from .branchnorm_5 import failed

LONG, DEEP = 3000, 50  # updates, and layers a side, from which divergence is judged


@claim(
    "C32",
    figure="admin:3",
    paper="Admin",
    sentence="Gradients of different parameters range widely, Adam's updates do not",
    source="Admin, Fig. 5",
    statistic="log10(p95 / p5) over sub-layers of the gradient norm minus that of the update's RMS, last probed step "
    "of Post-LN; the paper compares an epoch's change of the weights, of which one update is the part recorded here",
    threshold="R: > 1 decade; X: < 0 (the plan names no X: ours)",
    sweep="branchnorm:8",
)
def updates_are_narrow(runs: Runs) -> list[Effect]:
    groups = runs.where(kind="train", label="postln", table=("grad_norm", "update_ratio")).groups()
    if not groups:
        raise MissingRuns("needs a trained postln with grad_norm and update_ratio")
    longest = max(groups, key=lambda g: (g[0].settings.get("train.steps", 0), len(g)))
    found = {
        seed: _decades(r, "grad_norm", "value") - _decades(r, "update_ratio", "rms") for seed, r in _items(longest)
    }
    return [Effect("decades wider", found, Region(low=1), Region(high=0))]


def _items(runs: Runs) -> list[tuple[int, Record]]:
    return [*runs.by_seed().items()]


def _decades(record: Record, table: str, column: str) -> float:
    values = record.at(table, None, [column])[column].to_numpy(float)
    low, high = np.percentile(values[np.isfinite(values) & (values > 0)], (5, 95))
    return math.log10(high / low)


@claim(
    "C33",
    figure="admin:3",
    paper="Admin",
    sentence="Adam removes the imbalance of gradients",
    source="Admin, Sec. 3.3",
    statistic="update RMS of the first over the last decoder layer of a 50L-50L Post-LN, mean of logs, updates 1-19",
    threshold="R: in [1/3, 3]; X: < 1/3, as where gradients fall below Adam's eps",
    sweep="deepnet:4",
)
def adam_balances(runs: Runs) -> list[Effect]:
    deep = runs.where(lambda run: run.layers == (DEEP, DEEP), kind="train", label="postln", table="update_ratio")
    if not deep:
        raise MissingRuns(
            "needs a 50L-50L postln of 20 updates",
            "stabilitylab sweep --grid arch=postln depth=100 seed=3..7 steps=20",
        )
    found = {}
    for seed, record in deep.by_seed().items():
        data = record.frame("update_ratio", ["rms"])
        data = data[(data["stack"] == "decoder") & (data["layer"] > 0) & data["step"].between(1, 19)]
        by_layer = data.groupby("layer")["rms"].agg(lambda values: float(np.exp(np.log(values).mean())))
        found[seed] = float(by_layer.iloc[0] / by_layer.iloc[-1])
    return [Effect("first / last decoder layer", found, Region(1 / 3, 3), Region(high=1 / 3), log=True)]


def _long_and_deep(runs: Runs, label: str, depth: int) -> Runs:
    def fit(run: Record) -> bool:
        return run.depth >= depth and run.settings.get("train.steps", 0) >= LONG

    found = runs.where(fit, kind="train", label=label)
    if not found:
        raise MissingRuns(
            f"needs {label} of {depth} layers a side or more, trained for {LONG:,} updates",
            f"stabilitylab sweep --grid arch=postln,deepnorm,branchnorm,admin depth=36,100 seed=3..8 steps={LONG}",
        )
    return found


def _failures(runs: Runs, label: str, depth: int, most: bool) -> Share:
    own = _long_and_deep(runs, label, depth)
    inside, outside = (Region(low=0.5), Region(high=0.5)) if most else (Region(high=0.5), Region(low=0.5))
    return Share(f"{label}, {depth}L or more, failed", sum(map(failed, own)), len(own), inside, outside)


@claim(
    "C34",
    figure="branchnorm:5",
    paper="DeepNet",
    sentence="A deep Post-LN diverges where DeepNorm, BranchNorm and (18L) Admin train",
    source="DeepNet, BranchNorm and Admin, Tables 1 and 2",
    statistic="share of runs that diverged or are stuck after 3,000 updates: Post-LN, DeepNorm and BranchNorm at 50 "
    "layers a side or more, Admin at 18",
    threshold="R: more than half of Post-LN's, less than half of each other's; X: the reverse of any",
    sweep="branchnorm:5",
)
def deep_postln_diverges(runs: Runs) -> list[Share]:
    others = [_failures(runs, label, DEEP, most=False) for label in ("deepnorm", "branchnorm")]
    return [_failures(runs, "postln", DEEP, most=True), *others, _failures(runs, "admin", 18, most=False)]


@claim(
    "C35",
    figure="branchnorm:5",
    paper="DeepNet",
    sentence="Admin diverges at 50L-50L",
    source="DeepNet and BranchNorm, Table 1; the Admin repository's 100L-100L recipe says otherwise",
    statistic="share of Admin runs of 50 layers a side or more that diverged or are stuck after 3,000 updates",
    threshold="R: more than half; X: less than half",
    sweep="branchnorm:5",
)
def admin_diverges(runs: Runs) -> list[Share]:
    return [_failures(runs, "admin", DEEP, most=True)]
