"""BranchNorm, Figure 9: the share of FFN activations above 0, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....experiments import Experiment, Recipe, sweep
from ... import style
from ...arrange import alike, apart
from ...base import Figure, MissingRuns, Picture, figure
from ...claims import NAMED_LATER, Effect, Share, claim
from ...collection import Record, Runs, pairs
from ...measures.comparison import ENOUGH, both, comparable, counted, failed, largest_group, matched
from ...measures.layers import STACKS, above_zero, differences, layer_values, stack_panels
from ...measures.provenance import provenance
from ...statistics import Region
from .figure_8 import PAPERS, comparison

TABLE, COLUMN = "activation_sparsity", "nonzero_fraction"


@figure("branchnorm:9", title="Share of FFN activations above 0", source="BranchNorm, Figure 9; Li et al. 2022")
class NonzeroShare(Figure):
    """The share of entries > 0 after the feed-forward activation, mean over the held-out batch. A smaller share is
    sparser. After ReLU these are the entries that are not zero; GELU and SwiGLU make hardly any entry exactly 0.

    The paper's levels of .03 to .09 belong to 100k updates. A short run can only show the order of architectures.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = largest_group(runs, [TABLE], self.id, ended=True, between=("deepnorm", "branchnorm"))
        sparsity = stack_panels(group, TABLE, COLUMN, "layer", f"share of {above_zero(group)} activations")
        panels, controls = apart(sparsity, PAPERS)
        return Picture(alike(panels), _finding(group), notes, controls=controls, provenance=provenance(group))


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
    """Give each architecture's mean, if BranchNorm and DeepNorm cannot be compared."""
    parts = []
    for label in group.labels:
        own = group.where(label=label)
        shares = [x for run in own for stack in STACKS for x in layer_values(run, TABLE, COLUMN, stack).values()]
        parts.append(f"{style.title(label)} {np.mean(shares):.1%} ({counted(len(own.seeds))})")
    return f"Share of {above_zero(group)} activations: {', '.join(parts)}."


@claim(
    "C43",
    figure="branchnorm:9",
    stage="after training",
    paper="BranchNorm",
    sentence="BranchNorm's activations are sparser than DeepNorm's in all layers",
    source="BranchNorm, Fig. 9",
    statistic="share of all layers of both stacks, by seed, with a lower nonzero fraction in BranchNorm; beside it "
    "each stack's",
    threshold="R: >= .95; X: < .5",
    sweep="branchnorm:8",
    pilot="decoder 12 of 12, encoder 1 of 12 (2 seeds, 400 steps)",
    after=NAMED_LATER,
)
def sparser_in_all_layers(runs: Runs) -> list[Share]:
    compared = matched(runs, "branchnorm", "deepnorm", TABLE)
    found, of = {seed: differences(a, b, TABLE, COLUMN) for seed, a, b in compared}, both(compared)

    def below(stacks: Sequence[str]) -> dict[int, tuple[int, int]]:
        return {
            seed: (sum(int((own[stack] < 0).sum()) for stack in stacks), sum(len(own[stack]) for stack in stacks))
            for seed, own in found.items()
        }

    whole = Share("layers with BranchNorm below", below(STACKS), Region(low=0.95 - 1e-9), Region(high=0.5), of=of)
    stacks = [stack for stack in STACKS if all(len(own[stack]) for own in found.values())]
    return [whole, *(Share(f"{stack} layers with BranchNorm below", below([stack]), of=of) for stack in stacks)]


@claim(
    "C44",
    figure="branchnorm:9",
    stage="after training",
    paper="BranchNorm",
    sentence="Activations grow sparser with training",
    source="Li et al. 2022, as used by BranchNorm, Sec. 5.3",
    statistic="Spearman's rho of the mean nonzero fraction of all layers with the step, in each run of BranchNorm that "
    "trained; beside it DeepNorm's",
    threshold="R: < -.8; X: > 0 (the plan names no X: ours)",
    sweep="branchnorm:8",
    kind="implied",
)
def sparser_with_training(runs: Runs) -> list[Effect]:
    first = _trends(runs, "branchnorm", Region(high=-0.8), Region(low=0))
    if not first:
        raise MissingRuns(f"needs trained runs of branchnorm with {TABLE} at three steps or more")
    return [*first, *_trends(runs, "deepnorm")]


def _trends(
    runs: Runs, label: str, reproduced: Region | None = None, contradicted: Region | None = None
) -> list[Effect]:
    """Return the trend of the runs trained longest, with enough seeds, then of the deepest; [] if there are none."""
    trained = runs.where(lambda run: not failed(run), kind="train", label=label, table=TABLE)
    found = [
        (group, {run.seed: rho for run in group if np.isfinite(rho := _trend(run))}) for group in comparable(trained)
    ]
    found = [one for one in found if one[1]]
    if not found:
        return []

    def rank(one: tuple[Runs, dict[int, float]]) -> tuple[int, ...]:
        group, values = one
        return min(len(values), ENOUGH), group[0].updates, group[0].depth, len(values)

    group, values = max(found, key=rank)
    name = f"rho over {group[0].updates:,} updates of {style.title(label)}"
    return [Effect(name, values, reproduced, contradicted, of=group.where(lambda run: run.seed in values))]


def _trend(record: Record) -> float:
    """Return Spearman's rho of the mean over all layers with the step; NaN if it is undefined."""
    by_step = record.frame(TABLE, [COLUMN]).groupby("step")[COLUMN].mean()
    if len(by_step) < 3 or by_step.nunique() < 2:
        return float("nan")
    from scipy import stats

    result = stats.spearmanr(by_step.index.to_numpy(), by_step.to_numpy())
    return float(result.statistic)  # type: ignore[attr-defined]


@sweep(
    "branchnorm:9", scales=("tiny", "h200", "paper"), minutes=367, folder="branchnorm:8", any_length=("tiny", "h200")
)
def sparsity_in_the_comparison(ask: Recipe) -> Iterator[Experiment]:
    """Takes the runs of branchnorm:8."""
    yield from comparison(ask)
