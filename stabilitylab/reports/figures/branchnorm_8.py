"""BranchNorm, Figure 8: how alike adjacent layers are, with what a dead encoder would look like beside it."""

from __future__ import annotations

import numpy as np

from ..base import Figure, MissingRuns, Panel, Picture, figure
from ..claims import Effect, claim
from ..collection import Record, Runs, pairs
from ..layerwise import (
    STACKS,
    by_layer,
    differences,
    gradient_panel,
    held_out_panel,
    largest_group,
    layer_values,
)
from ..statistics import Region, signed_rank

TABLE = "cosine_similarity"
FIRST = 2  # row l compares layers l - 1 and l; that of l = 1, with the embedding, is stored and not drawn


@figure("branchnorm:8", title="Cosine similarity of adjacent layers", source="BranchNorm, Figure 8")
class AdjacentSimilarity(Figure):
    """cos(h_{l-1}, h_l) per token between full-layer outputs, mean over the real tokens of the held-out batch, eval.

    Inferred: the paper states neither position nor averaging nor pooling, and its axis shows 18 layers where its text
    says 200. Held-out loss and encoder gradient stand beside it: an encoder that does not learn is similar, too.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = largest_group(runs, [TABLE], self.id)
        panels = [
            Panel(
                f"{stack.capitalize()}", "layer l, against l - 1", "cosine similarity",
                by_layer(group, TABLE, "raw", stack, first=FIRST),
            )
            for stack in STACKS
            if any(layer_values(record, TABLE, "raw", stack) for record in group)
        ]  # fmt: skip
        return Picture([*panels, held_out_panel(group), gradient_panel(group)], _finding(group), notes)


def _finding(group: Runs) -> str:
    found = [_all(differences(a, b, TABLE, "raw", lowest=FIRST)) for _, a, b in _deepnorm_against_branchnorm(group)]
    if not found:
        return f"Adjacent layers of {', '.join(group.labels)} after training; DeepNorm against BranchNorm needs both."
    middle = np.mean(found, axis=0)
    return (
        f"DeepNorm's adjacent layers are more alike than BranchNorm's in {int((middle > 0).sum())} of {len(middle)} "
        f"pairs (median difference {np.median(middle):+.3f}, {_count(len(found))})."
    )


def _count(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _all(found: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([found[stack] for stack in STACKS])


def _deepnorm_against_branchnorm(group: Runs) -> list[tuple[int, Record, Record]]:
    return pairs(group.where(label="deepnorm"), group.where(label="branchnorm"))


def _compared(runs: Runs) -> list[tuple[int, Record, Record]]:
    """The pairs of the largest group that has both."""
    groups = runs.where(kind="train", label=("deepnorm", "branchnorm"), table=TABLE).groups()
    found = max((_deepnorm_against_branchnorm(group) for group in groups), key=len, default=[])
    if not found:
        raise MissingRuns("needs trained runs of deepnorm and of branchnorm with the same seeds and settings")
    return found


@claim(
    "C41",
    figure="branchnorm:8",
    paper="BranchNorm",
    sentence="After training, adjacent layers are more alike in DeepNorm than in BranchNorm, in most layers",
    source="BranchNorm, Fig. 8",
    statistic="share of layer pairs where the cosine of DeepNorm exceeds BranchNorm's; median difference",
    threshold="R: share >= .8 and median difference > .02; X: share < .5",
    sweep="branchnorm:8",
    pilot="18 of 20 pairs, median about .01 (2 seeds)",
)
def similarity_after_training(runs: Runs) -> list[Effect]:
    found = {seed: _all(differences(a, b, TABLE, "raw", lowest=FIRST)) for seed, a, b in _compared(runs)}
    share = {seed: float((values > 0).mean()) for seed, values in found.items()}
    median = {seed: float(np.median(values)) for seed, values in found.items()}
    return [
        Effect("share of pairs with DeepNorm above", share, Region(low=0.8 - 1e-9), Region(high=0.5)),
        Effect("median difference", median, Region(low=0.02), p=signed_rank([*median.values()])),
    ]


@claim(
    "C42",
    figure="branchnorm:8",
    paper="BranchNorm",
    sentence="(control) The same holds at initialisation, or follows from alpha alone",
    source="control of BranchNorm, Fig. 8",
    statistic="median difference of cosines, DeepNorm - BranchNorm, at step 0 and where alpha reaches 1; "
    "the difference left after a regression on beta_ii^2",
    threshold="R: > 0 at step 0 and at T, and within .01 of 0 at equal beta_ii^2; X: < 0 at step 0 or at T. "
    "The plan names no threshold: these are ours, set before the runs",
    sweep="branchnorm:8",
    pilot="at init .991 (DeepNorm) against .983 (alpha = 1, same init) and 1.000 (BranchNorm, first step)",
)
def similarity_at_initialisation(runs: Runs) -> list[Effect]:
    compared = _compared(runs)
    found = []
    for name, at in (("step 0", lambda run: 0), ("the end of the ramp", lambda run: int(run.settings["model.T"]))):
        median = {
            seed: float(np.median(_all(differences(a, b, TABLE, "raw", at(b), FIRST)))) for seed, a, b in compared
        }
        found.append(Effect(f"median difference at {name}", median, Region(low=0), Region(high=0)))
    if all("branch_variance" in run.tables for _, *both in compared for run in both):
        left = {seed: _difference_at_equal_beta(a, b) for seed, a, b in compared}
        found.append(Effect("difference at equal beta_ii^2", left, Region(-0.01, 0.01)))
    return found


def _difference_at_equal_beta(first: Record, second: Record) -> float:
    """Coefficient of the architecture in a least-squares fit of the cosine on it and on the layer's mean beta_ii^2."""
    rows = []
    for which, record in ((1.0, first), (0.0, second)):
        for stack in STACKS:
            cosine = layer_values(record, TABLE, "raw", stack)
            branch, total = (layer_values(record, "branch_variance", column, stack) for column in ("branch", "sum"))
            rows += [
                (cosine[layer], which, branch[layer] / total[layer], 1.0)
                for layer in sorted(cosine.keys() & branch.keys())
                if layer >= FIRST
            ]
    data = np.array(rows)
    return float(np.linalg.lstsq(data[:, 1:], data[:, 0], rcond=None)[0][0])
