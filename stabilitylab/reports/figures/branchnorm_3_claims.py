"""Claims on BranchNorm's gradients, at initialisation (C07, C08) and in the first updates (C09, C10)."""

from __future__ import annotations

import math

import numpy as np

from ..base import MissingRuns
from ..claims import NAMED_LATER, Effect, claim, together
from ..collection import Record, Runs, pairs
from ..layerwise import ENOUGH, Pairs, both, comparable, with_the_protocols_ramp
from ..statistics import Region
from .branchnorm_3 import BEGINNING, LEAST, LOSS, OUTSIDE, column, complete, non_branch, roughness, total

STILL, FULL, FIRST = "branchnorm alpha=0", "branchnorm T=1", "branchnorm"
PAPER_RAMP = 4000  # T; the pilot's number belongs to its first step, alpha = 1 / 4000


def _unevenness(record: Record) -> float:
    """max / min over the decoder's layers of ||dE/dx_l|| at initialisation, x_l the layer's output.

    Without the top layer: its gradient has not passed a LayerNorm, which removes two directions once for all below.
    """
    data = record.at("activation_grad_norm", 0, ["value"])
    data = data[(data["stack_name"] == "decoder") & (data["sublayer"] == "ffn")]
    values = data.loc[data["layer"] < data["layer"].max(), "value"].to_numpy(float)
    return float(values.max() / values.min()) if len(values) > 1 and values.min() > 0 else math.nan


def _at_initialisation(runs: Runs, label: str) -> Pairs:
    """Seed -> one-step runs (float64) with alpha = 0 and of ``label``, of the group with the most seeds."""
    ready = runs.where(
        lambda run: run.label != FIRST or run.settings["model.T"] == PAPER_RAMP,
        kind="onestep", label=(STILL, label), table="activation_grad_norm",
    )  # fmt: skip
    found = (pairs(group.where(label=STILL), group.where(label=label)) for group in comparable(ready))
    best = max(found, key=len, default=[])
    if not best:
        named = f"{label!r} (T = {PAPER_RAMP})" if label == FIRST else repr(label)
        raise MissingRuns(f"needs one-step runs of {STILL!r} and of {named} with the same seeds and depth")
    return best


@claim(
    "C07",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="At alpha = 0 the gradient dE/dx_l is the same in all layers",
    source="BranchNorm, Eq. 9",
    statistic="max / min over decoder layers of ||dE/dx_l|| in float64, the larger of that at alpha = 0 and that at "
    "alpha = 1/4000; without the top layer, whose gradient has passed no norm; beside it each",
    threshold="R: < 1.0001; X: > 1.05 (the plan names no X: ours)",
    sweep="claims:fast",
    after=NAMED_LATER,
    pilot="1.0000 at alpha = 0; 1.000003 at 1/4000",
)
def identical_gradients(runs: Runs) -> list[Effect]:
    found = _at_initialisation(runs, FIRST)
    still, first = ({seed: _unevenness(one[place]) for seed, *one in found} for place in (0, 1))
    each = [
        Effect("max / min at alpha = 0", still, log=True, of=[run for _, run, _ in found]),
        Effect("max / min at alpha = 1/4000", first, log=True, of=[run for *_, run in found]),
    ]
    return [together("max / min, the larger", each, max, Region(high=1.0001), Region(low=1.05)), *each]


@claim(
    "C08",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="... and it is alpha_t that does it, not the initialisation",
    source="control of BranchNorm, Eq. 9 and Sec. 3.2",
    statistic="max / min of ||dE/dx_l|| at alpha = 1 with the same initialisation, minus that at alpha = 0",
    threshold="R: > .5; X: < .1",
    sweep="claims:fast",
    pilot=".015",
    kind="control",
)
def due_to_alpha(runs: Runs) -> list[Effect]:
    found = _at_initialisation(runs, FULL)
    gap = {seed: _unevenness(full) - _unevenness(still) for seed, still, full in found}
    return [Effect("difference of max / min", gap, Region(low=0.5), Region(high=0.1), of=both(found))]


def _early(runs: Runs, name: str, last: int) -> Pairs:
    """BranchNorm and DeepNorm by seed, where the metric ``name`` is on record at all steps from 0 to ``last``; of
    several such groups one that has the norms, too, which are the runs that the figure is about."""
    fit = runs.where(lambda run: complete(run, name, last), kind="train", label=("branchnorm", "deepnorm"))
    groups = comparable(with_the_protocols_ramp(fit))
    found = [pairs(group.where(label="branchnorm"), group.where(label="deepnorm")) for group in groups]
    best = max(found, key=_rank, default=[])
    if not best:
        raise MissingRuns(f"needs branchnorm and deepnorm with {name} at each of the first {last + 1} updates")
    return best


def _rank(found: Pairs) -> tuple[int, ...]:
    return min(len(found), ENOUGH), _dense(found), found[0][1].depth if found else 0, len(found)


def _dense(found: Pairs) -> bool:
    return all(complete(run, OUTSIDE, LEAST) for run in both(found))


@claim(
    "C09",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="BranchNorm's gradient norm is smoother than DeepNorm's at the very beginning",
    source="BranchNorm, Fig. 3",
    statistic="standard deviation of successive differences of the log gradient norm over steps 1-200, "
    "BranchNorm / DeepNorm, of all parameters; beside it of those outside the branches",
    threshold="R: ratio < .8; X: > 1",
    sweep="branchnorm:3",
)
def smoother_gradients(runs: Runs) -> list[Effect]:
    compared = _early(runs, OUTSIDE, LEAST)
    of = both(compared)
    whole, part = (
        {seed: roughness(a, values) / roughness(b, values) for seed, a, b in compared} for values in (total, non_branch)
    )
    return [
        Effect("ratio, all parameters", whole, Region(high=0.8), Region(low=1), log=True, of=of),
        Effect("ratio, outside the branches", part, log=True, of=of),
    ]


@claim(
    "C10",
    figure="branchnorm:3",
    paper="BranchNorm",
    sentence="BranchNorm's loss falls as fast as DeepNorm's or faster at the beginning",
    source="BranchNorm, Fig. 3",
    statistic="mean training nll over steps 1-499, BranchNorm - DeepNorm [nats/token]",
    threshold="R: < 0; X: > 0",
    sweep="branchnorm:3",
    pilot="8.08 against 7.39 at step 12 (24L, T = 4000)",
    kind="implied",
)
def faster_loss(runs: Runs) -> list[Effect]:
    compared = _early(runs, LOSS, BEGINNING - 1)
    gap = {seed: _early_loss(a) - _early_loss(b) for seed, a, b in compared}
    return [Effect("difference of the mean nll", gap, Region(high=0), Region(low=0), of=both(compared))]


def _early_loss(record: Record) -> float:
    return float(np.mean(column(record, LOSS)[1:BEGINNING]))  # row i is step i in a record that is complete
