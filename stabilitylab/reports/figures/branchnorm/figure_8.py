"""BranchNorm, Figure 8: the similarity of adjacent layers, beside that of a dead encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ....experiments import Experiment, Recipe, one_gpu, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ... import style
from ...arrange import alike, apart
from ...base import Figure, MissingRuns, Picture, figure
from ...claims import Effect, Share, claim
from ...collection import Record, Runs, pairs
from ...measures.comparison import Pairs, both, counted, failed, hidden, largest_group, matched
from ...measures.layers import STACKS, differences, gradient_panel, held_out_panel, layer_values, stack_panels
from ...measures.provenance import provenance
from ...statistics import Region

TABLE = "cosine_similarity"
PAPERS = ("deepnorm", "branchnorm")  # series of the paper
FIRST = 2  # row l compares layers l - 1 and l; that of l = 1, with the embedding, is stored and not drawn
LATE = 0.2  # share of T by which the probe at the end of the ramp may come late


@figure("branchnorm:8", title="Cosine similarity of adjacent layers", source="BranchNorm, Figure 8")
class AdjacentSimilarity(Figure):
    """The distance 1 - cos(h_{l-1}, h_l) per token between the outputs of neighbouring full layers, mean over the real
    tokens of the held-out batch in eval mode. The axis is logarithmic, since cosines near 1 cannot be distinguished on
    a linear one.

    Inferred: the paper states neither position nor averaging nor pooling, and its axis shows 18 layers where its text
    says 200. The controls show held-out loss and encoder gradient, since the layers of an encoder that does not learn
    are similar, too.
    """

    def picture(self, runs: Runs) -> Picture:
        group, notes = largest_group(runs, [TABLE], self.id, ended=True, between=("deepnorm", "branchnorm"))
        axes = ("layer l, against l - 1", "1 - cosine similarity")
        similarity = stack_panels(group, TABLE, "raw", *axes, first=FIRST, log=True, of=_unlike)
        panels, _ = apart(similarity, PAPERS)
        controls = [panel for panel in (*similarity, held_out_panel(group), gradient_panel(group)) if panel.series]
        if not panels:
            panels, controls = controls, []
        notes = [*notes, *hidden([*panels, *controls])]
        return Picture(alike(panels), _finding(group), notes, controls=controls, provenance=provenance(group))


def _unlike(cosine: float) -> float:
    return float(np.maximum(0.0, 1 - cosine))


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
    """Name each architecture's median, if DeepNorm and BranchNorm cannot be compared."""
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
    stage="after training",
    paper="BranchNorm",
    sentence="After training, adjacent layers are more alike in DeepNorm than in BranchNorm, in most layers",
    source="BranchNorm, Fig. 8",
    statistic="share of layer pairs, by seed, where the cosine of DeepNorm exceeds BranchNorm's; beside it the median "
    "difference",
    threshold="R: >= .8; X: < .5",
    sweep="branchnorm:8",
    pilot="18 of 20 pairs, median about .01 (2 seeds)",
)
def similarity_after_training(runs: Runs) -> list[Effect | Share]:
    compared = matched(runs, "deepnorm", "branchnorm", TABLE)
    found = _differences(compared)
    counts = {seed: (int((values > 0).sum()), len(values)) for seed, values in found.items()}
    median, of = {seed: float(np.median(values)) for seed, values in found.items()}, both(compared)
    return [
        Share("pairs with DeepNorm above", counts, Region(low=0.8 - 1e-9), Region(high=0.5), of=of),
        Effect("median difference", median, of=of),
    ]


def _differences(compared: Pairs, step: Callable[[Record], int | None] = lambda run: None) -> dict[int, np.ndarray]:
    """Return the first minus the second at all layers of both stacks, by seed, at the ``step`` that the second defines
    (None: the last).

    Raises MissingRuns if a stack has a single layer.
    """
    found = {seed: _all(differences(a, b, TABLE, "raw", step(b), FIRST)) for seed, a, b in compared}
    if not all(map(len, found.values())):
        raise MissingRuns("needs models of two layers a stack or more")
    return found


@claim(
    "C42",
    figure="branchnorm:8",
    stage="initialisation",
    paper="BranchNorm",
    sentence="Figure 8 is not about training: the difference is there before it",
    source="control of BranchNorm, Fig. 8",
    statistic="median difference of cosines, DeepNorm - BranchNorm, at step 0; beside it that where alpha reaches 1, "
    "and what a regression on beta_ii^2 and the stack leaves of it after training",
    threshold="R: > 0; X: < 0 (ours, set before the runs)",
    sweep="branchnorm:8",
    pilot="at init .991 (DeepNorm) against .983 (alpha = 1, same init) and 1.000 (BranchNorm, first step)",
    kind="control",
    after="the stack entered the regression after a look",
)
def similarity_at_initialisation(runs: Runs) -> list[Effect]:
    ready = runs.where(_from_the_start, kind="train", label=("deepnorm", "branchnorm"), table=TABLE)
    compared = matched(ready, "deepnorm", "branchnorm", TABLE)
    of = both(compared)

    def median(
        name: str, step: Callable[[Record], int], above: Region | None = None, below: Region | None = None
    ) -> Effect:
        values = {seed: float(np.median(found)) for seed, found in _differences(compared, step).items()}
        return Effect(f"median difference at {name}", values, above, below, of=of)

    found = [median("step 0", lambda run: 0, Region(low=0), Region(high=0))]
    if all(_outlasts_the_ramp(run) for _, _, run in compared):
        found.append(median("the end of the ramp", _ramp))
    if all("branch_variance" in run.tables for run in of):
        left = {seed: _difference_at_equal_beta(a, b) for seed, a, b in compared}
        found.append(Effect("difference at equal beta_ii^2", left, of=of))
    return found


def _ramp(record: Record) -> int:
    return int(record.settings["model.T"])


def _from_the_start(record: Record) -> bool:
    return 0 in _steps(record)


def _outlasts_the_ramp(record: Record) -> bool:
    """True if the similarity was recorded at the step where alpha reaches 1, or soon after."""
    steps, ramp = _steps(record), _ramp(record)
    return bool(((steps >= ramp - 1) & (steps <= (1 + LATE) * ramp)).any())


def _steps(record: Record) -> np.ndarray:
    return record.probed(TABLE)


def _difference_at_equal_beta(first: Record, second: Record) -> float:
    """Return the coefficient of ``first`` in a least-squares fit of the cosine on it, the layer's beta_ii^2 and the
    stack."""
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


GPU_UPDATES = 2000  # on one GPU, where none are asked for


@sweep("branchnorm:8", scales=("tiny", "h200", "paper"), minutes=367, any_length=("tiny", "h200"))
def comparison(ask: Recipe) -> Iterator[Experiment]:
    """Compares the arms of Protocol 2 at their own rates, 18L-18L, as the figure's axes read, and 6L-6L, 6000
    updates; at full size 18L-18L and 100L-100L, as its text says. On one GPU all arms have the papers' rate, where
    results/h200/make.py chooses one for each first."""
    if ask.tiny:
        yield from protocol.main(ask)
    elif ask.one_gpu:
        yield from one_gpu.main(ask, ask.steps or GPU_UPDATES)
    else:
        judged, others = ("deepnorm", "branchnorm", "branchnorm T=1"), ("postln", "preln", "admin")
        yield from ask.runs((*judged, *others), [18], BRANCHNORM, protocol.WITH_LAYERS)
        yield from ask.runs(judged, [100], BRANCHNORM, protocol.WITH_LAYERS)
