"""BranchNorm, Figure 8: how alike adjacent layers are, with what a dead encoder would look like beside it."""

from __future__ import annotations

import numpy as np

from .. import style
from ..base import Figure, MissingRuns, Picture, figure
from ..claims import Effect, claim
from ..collection import Record, Runs, pairs
from ..layerwise import (
    STACKS,
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

TABLE = "cosine_similarity"
FIRST = 2  # row l compares layers l - 1 and l; that of l = 1, with the embedding, is stored and not drawn
LATE = 0.2  # share of T by which the probe at the end of the ramp may come late


@figure("branchnorm:8", title="Cosine similarity of adjacent layers", source="BranchNorm, Figure 8")
class AdjacentSimilarity(Figure):
    """cos(h_{l-1}, h_l) per token between full-layer outputs, mean over the real tokens of the held-out batch, eval.

    Inferred: the paper states neither position nor averaging nor pooling, and its axis shows 18 layers where its text
    says 200. Held-out loss and encoder gradient stand beside it: an encoder that does not learn is similar, too.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = largest_group(runs, [TABLE], self.id, ended=True)
        similarity = stack_panels(group, TABLE, "raw", "layer l, against l - 1", "cosine similarity", first=FIRST)
        panels = [*similarity, held_out_panel(group), gradient_panel(group)]
        panels = [panel for panel in panels if panel.series]
        return Picture(panels, _finding(group), [*notes, *hidden(panels)])


def _finding(group: Runs) -> str:
    trained = group.where(lambda run: not failed(run))
    compared = pairs(trained.where(label="deepnorm"), trained.where(label="branchnorm"))
    found = [_all(differences(a, b, TABLE, "raw", lowest=FIRST)) for _, a, b in compared]
    found = [values for values in found if len(values) and np.isfinite(values).all()]
    if not found:
        return _levels(group)
    middle = np.mean(found, axis=0)
    return (
        f"DeepNorm's adjacent layers are more alike than BranchNorm's in {int((middle > 0).sum())} of {len(middle)} "
        f"pairs (median difference {np.median(middle):+.3f}, {counted(len(found))})."
    )


def _levels(group: Runs) -> str:
    """Each architecture's median, where DeepNorm and BranchNorm cannot be compared."""
    parts = []
    for label in group.labels:
        own = group.where(label=label)
        cosines = [
            cosine
            for record in own
            for stack in STACKS
            for layer, cosine in layer_values(record, TABLE, "raw", stack).items()
            if layer >= FIRST and np.isfinite(cosine)
        ]
        if cosines:
            parts.append(f"{style.title(label)} {np.median(cosines):.3f} ({counted(len(own.seeds))})")
    return f"Median cosine of adjacent layers: {', '.join(parts) or 'none, with one layer a stack'}."


def _all(found: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([found[stack] for stack in STACKS])


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
    compared = matched(runs, "deepnorm", "branchnorm", TABLE)
    found = {seed: _all(differences(a, b, TABLE, "raw", lowest=FIRST)) for seed, a, b in compared}
    if not all(map(len, found.values())):
        raise MissingRuns("needs models of two layers a stack or more")
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
    sentence="(control) Figure 8 is not about training: the difference is there before it, and none is left at equal "
    "beta_ii",
    source="control of BranchNorm, Fig. 8",
    statistic="median difference of cosines, DeepNorm - BranchNorm, at step 0 and where alpha reaches 1; after "
    "training, the difference that a regression on beta_ii^2 and the stack leaves (the stack was added after a look)",
    threshold="R: > 0 at step 0 and at T, and within .01 of 0 at equal beta_ii^2; X: < 0 at step 0 or at T. "
    "The plan names no threshold: these are ours, set before the runs",
    sweep="branchnorm:8",
    pilot="at init .991 (DeepNorm) against .983 (alpha = 1, same init) and 1.000 (BranchNorm, first step)",
)
def similarity_at_initialisation(runs: Runs) -> list[Effect]:
    ready = runs.where(kind="train", label=("deepnorm", "branchnorm"), table=TABLE).where(_outlasts_the_ramp)
    compared = matched(ready, "deepnorm", "branchnorm", TABLE)
    if not all(len(_all(differences(a, b, TABLE, "raw", lowest=FIRST))) for _, a, b in compared):
        raise MissingRuns("needs models of two layers a stack or more")
    found = []
    for name, at in (("step 0", lambda run: 0), ("the end of the ramp", _ramp)):
        median = {
            seed: float(np.median(_all(differences(a, b, TABLE, "raw", at(b), FIRST)))) for seed, a, b in compared
        }
        p = signed_rank([*median.values()])
        found.append(Effect(f"median difference at {name}", median, Region(low=0), Region(high=0), p=p))
    if all("branch_variance" in run.tables for _, *both in compared for run in both):
        left = {seed: _difference_at_equal_beta(a, b) for seed, a, b in compared}
        found.append(Effect("difference at equal beta_ii^2", left, Region(-0.01, 0.01)))
    return found


def _ramp(record: Record) -> int:
    return int(record.settings["model.T"])


def _outlasts_the_ramp(record: Record) -> bool:
    """Is the similarity on record at step 0, and for BranchNorm where alpha reaches 1, or soon after?"""
    steps = np.unique(record.frame(TABLE, ["raw"])["step"].to_numpy())
    ramp = _ramp(record)
    at_end = steps[(steps >= ramp - 1) & (steps <= (1 + LATE) * ramp)]
    return 0 in steps and (record.label != "branchnorm" or len(at_end) > 0)


def _difference_at_equal_beta(first: Record, second: Record) -> float:
    """Coefficient of ``first`` in a least-squares fit of the cosine on it, the layer's beta_ii^2 and the stack."""
    rows = []
    for is_first, record in ((1.0, first), (0.0, second)):
        variances = record.at("branch_variance", None, ["branch", "total"])
        variances = variances.assign(share=variances["branch"] / variances["total"])
        for place, stack in enumerate(STACKS):
            cosine = layer_values(record, TABLE, "raw", stack)
            beta = variances.loc[variances["stack_name"] == stack].groupby("layer")["share"].mean()
            rows += [
                (cosine[layer], is_first, beta[layer], float(place), 1.0)
                for layer in sorted(cosine.keys() & {*beta.index})
                if layer >= FIRST
            ]
    data = np.array(rows)
    return float(np.linalg.lstsq(data[:, 1:], data[:, 0], rcond=None)[0][0])
