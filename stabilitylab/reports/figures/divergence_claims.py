"""Claims on what Adam's updates balance, and on who diverges: C33 to C35."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import fisher_exact

from ..base import MissingRuns
from ..claims import Effect, Share, claim
from ..collection import LAYERS, Record, Runs
from ..layerwise import comparable, failed
from ..statistics import Region

LONG, DEEP = 3000, 50  # updates, and layers a side, from which divergence is judged
EARLY = 20  # updates over which Adam has to balance them in a deep model


def _updates(record: Record) -> int:
    return int(record.settings.get("train.steps", 0))


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


COMMAND = f"stabilitylab sweep --grid arch=postln,deepnorm,branchnorm,admin depth=36,100 seed=3..8 steps={LONG}"


def _long(runs: Runs) -> Runs:
    """Runs of the richest comparable group that were trained for so long."""
    groups = comparable(runs.where(lambda run: _updates(run) >= LONG, kind="train"), *LAYERS)
    return groups[0] if groups else Runs([])


def _arm(runs: Runs, label: str, exactly: int | None = None) -> Runs:
    """Those of an architecture with ``exactly`` so many layers a side (None: as deep as divergence is judged at)."""
    found = runs.where(lambda run: run.depth >= DEEP if exactly is None else run.depth == exactly, label=label)
    if not found:
        depth = f"{DEEP} layers a side or more" if exactly is None else f"{exactly} layers a side"
        raise MissingRuns(f"needs {label} of {depth}, trained for {LONG:,} updates", COMMAND)
    return found


def _counts(arm: Runs) -> tuple[int, int]:
    return sum(map(failed, arm)), len(arm)


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
    long = _long(runs.where(label=("postln", "deepnorm", "branchnorm", "admin")))
    postln = _counts(_arm(long, "postln"))
    arms = {label: _counts(_arm(long, label, 18 if label == "admin" else None))
            for label in ("deepnorm", "branchnorm", "admin")}  # fmt: skip
    shares = [Share(f"postln, {DEEP}L or more, failed", *postln, Region(low=0.5), Region(high=0.5))]
    for label, (lost, n) in arms.items():
        table = [[postln[0], postln[1] - postln[0]], [lost, n - lost]]
        p = float(np.asarray(fisher_exact(table)[1]))
        name = f"{label}, {'18L' if label == 'admin' else f'{DEEP}L or more'}, failed"
        shares.append(Share(name, lost, n, Region(high=0.5), Region(low=0.5), p))
    return shares


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
    own = _arm(_long(runs.where(label="admin")), "admin")
    return [Share(f"admin, {DEEP}L or more, failed", *_counts(own), Region(low=0.5), Region(high=0.5))]
