"""Claims on who diverges: C34 and C35."""

from __future__ import annotations

import numpy as np
from scipy.stats import fisher_exact

from ..base import MissingRuns
from ..claims import Share, claim
from ..collection import LAYERS, Runs
from ..layerwise import comparable, decided, failed
from ..stability import judged
from ..statistics import Region

LONG, DEEP = 3000, 50  # updates, and layers a side, from which divergence is judged
COMMAND = f"stabilitylab sweep --grid arch=postln,deepnorm,branchnorm,admin depth=36,100 seed=3..8 steps={LONG}"


def _long(runs: Runs) -> Runs:
    """Runs with a verdict of the richest comparable group that were trained for so long."""
    groups = comparable(judged(runs).where(lambda run: run.updates >= LONG), *LAYERS)
    return groups[0] if groups else Runs([])


def _arm(runs: Runs, label: str, exactly: int | None = None) -> Runs:
    """Those of an architecture with ``exactly`` so many layers a side (None: as deep as divergence is judged at, of
    each seed the shallowest)."""
    found = runs.where(lambda run: run.depth >= DEEP if exactly is None else run.depth == exactly, label=label)
    if not found:
        depth = f"{DEEP} layers a side or more" if exactly is None else f"{exactly} layers a side"
        raise MissingRuns(f"needs {label} of {depth}, trained for {LONG:,} updates", COMMAND)
    return Runs({run.seed: run for run in sorted(found, key=lambda run: -run.depth)}.values())


def _counts(arm: Runs) -> tuple[int, int]:
    known = decided(arm)
    return sum(map(failed, known)), len(known)


@claim(
    "C34",
    figure="table:stability",
    paper="DeepNet",
    sentence="A deep Post-LN diverges where DeepNorm, BranchNorm and (18L) Admin train",
    source="DeepNet, BranchNorm and Admin, Tables 1 and 2",
    statistic="share of runs of known state, one a seed, that diverged or are stuck after 3,000 updates: Post-LN, "
    "DeepNorm and BranchNorm at 50 layers a side or the next depth there is, Admin at 18",
    threshold="R: more than half of Post-LN's, less than half of each other's; X: the reverse of any",
    sweep="table:stability",
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
    figure="table:stability",
    paper="DeepNet",
    sentence="Admin diverges at 50L-50L",
    source="DeepNet and BranchNorm, Table 1; the Admin repository's 100L-100L recipe says otherwise",
    statistic="share of Admin runs, one a seed, of 50 layers a side or the next depth there is, that diverged or are "
    "stuck after 3,000 updates",
    threshold="R: more than half; X: less than half",
    sweep="table:stability",
)
def admin_diverges(runs: Runs) -> list[Share]:
    own = _arm(_long(runs.where(label="admin")), "admin")
    return [Share(f"admin, {DEEP}L or more, failed", *_counts(own), Region(low=0.5), Region(high=0.5))]
