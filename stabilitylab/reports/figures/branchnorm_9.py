"""BranchNorm, Figure 9: the share of FFN activations that are not zero, layer by layer."""

from __future__ import annotations

import numpy as np
from scipy import stats

from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, figure
from ..claims import Effect, claim
from ..collection import Record, Runs, pairs
from ..layerwise import STACKS, by_layer, differences, gradient_panel, held_out_panel, largest_group, layer_values
from ..statistics import Region

TABLE, COLUMN = "activation_sparsity", "nonzero_fraction"


@figure("branchnorm:9", title="Share of nonzero FFN activations", source="BranchNorm, Figure 9; Li et al. 2022")
class NonzeroShare(Figure):
    """Share of entries > 0 after the feed-forward activation, mean over the held-out batch; smaller is sparser.

    The paper's levels of .03 to .09 belong to 100k updates: a short run can only show the order of architectures.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = largest_group(runs, [TABLE], self.id)
        panels = [
            Panel(stack.capitalize(), "layer", "share of nonzero activations", by_layer(group, TABLE, COLUMN, stack))
            for stack in STACKS
            if any(layer_values(record, TABLE, COLUMN, stack) for record in group)
        ]
        return Picture([*panels, held_out_panel(group), gradient_panel(group)], _finding(group), notes)


def _finding(group: Runs) -> str:
    compared = pairs(group.where(label="branchnorm"), group.where(label="deepnorm"))
    if not compared:
        return f"Activations of {', '.join(map(style.title, group.labels))}; BranchNorm against DeepNorm needs both."
    lower = {
        stack: np.mean([differences(a, b, TABLE, COLUMN)[stack] for _, a, b in compared], axis=0) < 0
        for stack in STACKS
    }
    counts = " and ".join(f"{int(lower[s].sum())} of {len(lower[s])} {s} layers" for s in STACKS if len(lower[s]))
    seeds = "one seed" if len(compared) == 1 else f"{len(compared)} seeds"
    return f"BranchNorm is sparser than DeepNorm in {counts} ({seeds})."


def _compared(runs: Runs) -> list[tuple[int, Record, Record]]:
    groups = runs.where(kind="train", label=("branchnorm", "deepnorm"), table=TABLE).groups()
    found = max(
        (pairs(group.where(label="branchnorm"), group.where(label="deepnorm")) for group in groups), key=len, default=[]
    )
    if not found:
        raise MissingRuns("needs trained runs of branchnorm and of deepnorm with the same seeds and settings")
    return found


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
    found = {seed: differences(a, b, TABLE, COLUMN) for seed, a, b in _compared(runs)}
    return [
        Effect(
            f"share of {stack} layers with BranchNorm below",
            {seed: float((values[stack] < 0).mean()) for seed, values in found.items()},
            Region(low=0.95 - 1e-9),
            Region(high=0.5),
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
    statistic="Spearman's rho of the mean nonzero fraction of all layers with the step, in each run",
    threshold="R: < -.8; X: > 0 (the plan names no X: ours)",
    sweep="branchnorm:8",
)
def sparser_with_training(runs: Runs) -> list[Effect]:
    found = []
    for label in ("deepnorm", "branchnorm"):
        groups = runs.where(kind="train", label=label, table=TABLE).groups()
        rho = {seed: _rank_correlation(record) for seed, record in groups[0].by_seed().items()} if groups else {}
        rho = {seed: value for seed, value in rho.items() if np.isfinite(value)}
        if not rho:
            raise MissingRuns(f"needs trained runs of {label} with {TABLE} at three steps or more")
        found.append(Effect(f"rho of {style.title(label)}", rho, Region(high=-0.8), Region(low=0)))
    return found


def _rank_correlation(record: Record) -> float:
    by_step = record.frame(TABLE, [COLUMN]).groupby("step")[COLUMN].mean()
    if len(by_step) < 3:
        return float("nan")
    result = stats.spearmanr(by_step.index.to_numpy(), by_step.to_numpy())
    return float(result.statistic)  # type: ignore[attr-defined]
