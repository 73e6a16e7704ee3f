"""BranchNorm, Figure 9: the share of FFN activations that are not zero, layer by layer."""

from __future__ import annotations

import numpy as np
from scipy import stats

from .. import style
from ..base import Figure, MissingRuns, Picture, figure
from ..claims import Effect, claim
from ..collection import Record, Runs, pairs
from ..layerwise import (
    ENOUGH,
    STACKS,
    comparable,
    counted,
    differences,
    failed,
    gradient_panel,
    held_out_panel,
    hidden,
    largest_group,
    layer_values,
    matched,
    stack_panels,
)
from ..statistics import Region, signed_rank

TABLE, COLUMN = "activation_sparsity", "nonzero_fraction"


@figure("branchnorm:9", title="Share of nonzero FFN activations", source="BranchNorm, Figure 9; Li et al. 2022")
class NonzeroShare(Figure):
    """Share of entries > 0 after the feed-forward activation, mean over the held-out batch; smaller is sparser.

    The paper's levels of .03 to .09 belong to 100k updates: a short run can only show the order of architectures.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = largest_group(runs, [TABLE], self.id, ended=True)
        sparsity = stack_panels(group, TABLE, COLUMN, "layer", "share of nonzero activations")
        panels = [panel for panel in (*sparsity, held_out_panel(group), gradient_panel(group)) if panel.series]
        return Picture(panels, _finding(group), [*notes, *hidden(panels)])


def _finding(group: Runs) -> str:
    trained = group.where(lambda run: not failed(run))
    compared = pairs(trained.where(label="branchnorm"), trained.where(label="deepnorm"))
    found = [differences(a, b, TABLE, COLUMN) for _, a, b in compared]
    found = [values for values in found if all(np.isfinite(own).all() for own in values.values())]
    if not found:
        return _levels(group)
    lower = {stack: np.mean([values[stack] for values in found], axis=0) < 0 for stack in STACKS}
    counts = " and ".join(f"{int(lower[s].sum())} of {len(lower[s])} {s} layers" for s in STACKS if len(lower[s]))
    return f"BranchNorm is sparser than DeepNorm in {counts} ({counted(len(found))})."


def _levels(group: Runs) -> str:
    """Each architecture's mean, where BranchNorm and DeepNorm cannot be compared."""
    parts = []
    for label in group.labels:
        own = group.where(label=label)
        shares = [x for run in own for stack in STACKS for x in layer_values(run, TABLE, COLUMN, stack).values()]
        parts.append(f"{style.title(label)} {np.mean(shares):.1%} ({counted(len(own.seeds))})")
    return f"Of the activations are not zero: {', '.join(parts)}."


@claim(
    "C43",
    figure="branchnorm:9",
    paper="BranchNorm",
    sentence="BranchNorm's activations are sparser than DeepNorm's in all layers",
    source="BranchNorm, Fig. 9",
    statistic="share of layers with a lower nonzero fraction in BranchNorm, encoder and decoder apart",
    threshold="R: >= .95 in encoder and decoder; X: < .5 in either",
    sweep="branchnorm:8",
    pilot="decoder 12 of 12, encoder 1 of 12 (2 seeds, 400 steps)",
)
def sparser_in_all_layers(runs: Runs) -> list[Effect]:
    found = {seed: differences(a, b, TABLE, COLUMN) for seed, a, b in matched(runs, "branchnorm", "deepnorm", TABLE)}
    return [
        Effect(
            f"share of {stack} layers with BranchNorm below",
            {seed: float((values[stack] < 0).mean()) for seed, values in found.items()},
            Region(low=0.95 - 1e-9),
            Region(high=0.5),
            p=signed_rank([float(np.mean(values[stack])) for values in found.values()]),
        )
        for stack in STACKS
        if all(len(values[stack]) for values in found.values())
    ]


@claim(
    "C44",
    figure="branchnorm:9",
    paper="BranchNorm",
    sentence="Activations grow sparser with training",
    source="Li et al. 2022, as used by BranchNorm, Sec. 5.3",
    statistic="Spearman's rho of the mean nonzero fraction of all layers with the step, in each run that trained",
    threshold="R: < -.8; X: > 0 (the plan names no X: ours)",
    sweep="branchnorm:8",
)
def sparser_with_training(runs: Runs) -> list[Effect]:
    found = []
    for label in ("deepnorm", "branchnorm"):
        groups = comparable(runs.where(lambda run: not failed(run), kind="train", label=label, table=TABLE))
        measured = [
            (group[0].updates, {run.seed: rho for run in group if np.isfinite(rho := _trend(run))}) for group in groups
        ]
        steps, values = max(measured, key=lambda one: (min(len(one[1]), ENOUGH), one[0], len(one[1])), default=(0, {}))
        if values:
            name = f"rho over {steps} updates of {style.title(label)}"
            found.append(Effect(name, values, Region(high=-0.8), Region(low=0)))
    if not found:
        raise MissingRuns(f"needs trained runs of deepnorm or branchnorm with {TABLE} at three steps or more")
    return found


def _trend(record: Record) -> float:
    """Spearman's rho of the mean over all layers with the step; NaN where it is undefined."""
    by_step = record.frame(TABLE, [COLUMN]).groupby("step")[COLUMN].mean()
    if len(by_step) < 3 or by_step.nunique() < 2:
        return float("nan")
    result = stats.spearmanr(by_step.index.to_numpy(), by_step.to_numpy())
    return float(result.statistic)  # type: ignore[attr-defined]
