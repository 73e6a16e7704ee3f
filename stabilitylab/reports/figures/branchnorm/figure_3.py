"""BranchNorm, Figure 3: gradient norm and loss at the very beginning, and the cause of the smooth gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....experiments import Experiment, Recipe, one_gpu, probing, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ... import style
from ...arrange import apart, smoothed
from ...base import Figure, MissingRuns, Panel, Picture, Series, Spread, figure
from ...claims import NAMED_LATER, Effect, claim, together
from ...collection import Record, Runs, pairs
from ...measures.beginning import (
    LEAST,
    LOSS,
    OUTSIDE,
    TOTAL,
    Values,
    bits,
    column,
    complete,
    decoder_branches,
    encoder_branches,
    non_branch,
    roughness,
    steps_of,
    total,
)
from ...measures.comparison import (
    ENOUGH,
    Pairs,
    both,
    comparable,
    counted,
    hidden,
    largest_group,
    with_the_protocols_ramp,
)
from ...measures.initialisation import unevenness
from ...measures.layers import profiles
from ...measures.provenance import provenance
from ...statistics import Region

PAPERS = ("postln", "postln gain=1", "deepnorm", "branchnorm")
WINDOW = 15  # updates of a smoothed line
KEY = f"full: mean of {WINDOW} updates, faint: the single updates"
BEGINNING = 500  # updates that are drawn; the paper says "the very beginning" and no number
PARTS: dict[str, tuple[Values, str]] = {
    "not in a branch": (non_branch, "solid"),
    "decoder branches / alpha": (decoder_branches, "dashed"),
    "encoder branches / alpha²": (encoder_branches, "dotted"),
}
STILL, FULL, FIRST = "branchnorm alpha=0", "branchnorm T=1", "branchnorm"
PAPER_RAMP = 4000  # T; the pilot's number belongs to its first step, alpha = 1 / 4000


@figure("branchnorm:3", title="Gradient norm and loss at the beginning", source="BranchNorm, Figure 3")
class Beginning(Figure):
    """The global L2 norm of the gradient over all parameters, before clipping, and the unsmoothed training loss in
    bits.

    Inferred from the labels (fairseq's gnorm and nll_loss): the paper states neither model nor data nor range. The norm
    contains branch weights, whose gradient is multiplied by alpha_t; the last panel separates these. Lines are means
    over several updates, with the single updates drawn faintly behind them.
    """

    def picture(self, runs: Runs) -> Picture:
        fit = runs.where(lambda run: {TOTAL, LOSS} <= {*run.metrics} and len(run.metrics) > 1)
        dense = fit.where(lambda run: complete(run, OUTSIDE, LEAST))
        group, notes = largest_group(dense or fit, ["grad_norm"], self.id, between=("deepnorm", "branchnorm"))
        if dense and len(fit) > len(dense):
            notes.append(f"Not drawn: {len(fit) - len(dense)} without the norm of each of the first {LEAST} updates.")
        found = [panel for panel in (*_curves(group), _parts(group), *profiles(group)) if panel.series]
        panels, controls = apart(found, PAPERS)
        notes = [*notes, *hidden(found)]
        faint = any(one.faint for panel in found for one in panel.series)
        return Picture(
            panels, _finding(group), notes, columns=3, controls=controls, provenance=provenance(group),
            key=KEY if faint else "",
        )  # fmt: skip


def _line(group: Runs, label: str, values: Values, log: bool, **look: object) -> Series | None:
    """Return the first updates of all runs of a label; rows without the value (the one after training) are left out."""
    spread = Spread(log=log)
    for record in group.where(label=label):
        found, steps = values(record), steps_of(record)
        known = ~np.isnan(found) & (steps < BEGINNING)
        spread.add(steps[known].tolist(), found[known].tolist())
    return spread.series(style.title(label), arch=label, **look) if spread.points else None


def _curves(group: Runs) -> list[Panel]:
    """Return the panels of gradient norm and loss, each with its own axis."""
    norms, losses = (
        [one for label in group.labels if (line := _line(group, label, values, log)) for one in smoothed(line, WINDOW)]
        for values, log in ((total, True), (bits, False))
    )
    return [
        Panel("Gradient norm", "update", "global gradient norm (L2)", norms, log_y=True),
        Panel("Training loss", "update", "nll [bits/token, base 2]", losses),
    ]


def _parts(group: Runs) -> Panel:
    lines = [
        _line(group, label, values, True, dash=dash, detail=part)
        for label in group.labels
        if style.family(label) in ("branchnorm", "deepnorm")
        for part, (values, dash) in PARTS.items()
    ]
    return Panel(
        "Without the factor alpha", "update", "gradient norm (L2)", [line for line in lines if line], log_y=True
    )


def _finding(group: Runs) -> str:
    dense = group.where(lambda run: complete(run, OUTSIDE, LEAST))
    compared = pairs(dense.where(label="branchnorm"), dense.where(label="deepnorm"))
    moved = {
        values: [roughness(a, values) / roughness(b, values) for _, a, b in compared] for values in (total, non_branch)
    }
    known = [both for both in zip(*moved.values(), strict=True) if np.isfinite(both).all()]
    if not known:
        return _course(group)
    whole, part = np.exp(np.mean(np.log(known), axis=0))
    return (
        f"From step to step BranchNorm's log gradient norm moves {whole:.2f} times as much as DeepNorm's, and "
        f"{part:.2f} times without the branch weights ({counted(len(known))})."
    )


def _course(group: Runs) -> str:
    """Say where gradient norm and loss begin and end, for runs that cannot be compared."""
    parts = []
    for label in group.labels:
        norm, loss = _line(group, label, total, True), _line(group, label, bits, False)
        if norm and loss:
            parts.append(
                f"{style.title(label)} goes from {norm.y[0]:.3g} to {norm.y[-1]:.3g} in gradient norm and from "
                f"{loss.y[0]:.2f} to {loss.y[-1]:.2f} bits within {loss.x[-1]:g} updates ({counted(norm.seeds)})"
            )
    return f"{'; '.join(parts) or 'No gradient norm is on record'}."


def _at_initialisation(runs: Runs, label: str) -> Pairs:
    """Return the pairs of one-step runs (float64) with alpha = 0 and of ``label``, by seed, of the group with the most
    seeds."""
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
    stage="initialisation",
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
    still, first = ({seed: unevenness(one[place]) for seed, *one in found} for place in (0, 1))
    each = [
        Effect("max / min at alpha = 0", still, log=True, of=[run for _, run, _ in found]),
        Effect("max / min at alpha = 1/4000", first, log=True, of=[run for *_, run in found]),
    ]
    return [together("max / min, the larger", each, np.max, Region(high=1.0001), Region(low=1.05)), *each]


@claim(
    "C08",
    figure="branchnorm:3",
    stage="initialisation",
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
    gap = {seed: unevenness(full) - unevenness(still) for seed, still, full in found}
    return [Effect("difference of max / min", gap, Region(low=0.5), Region(high=0.1), of=both(found))]


def _early(runs: Runs, name: str, last: int) -> Pairs:
    """Return the pairs of BranchNorm and DeepNorm, by seed, with the metric ``name`` at all steps from 0 to ``last``.
    Of several such groups, one with gradient norms is preferred: its runs are those of the figure."""
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
    stage="first updates",
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
    stage="first updates",
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


@sweep("branchnorm:3", scales=("tiny", "h200", "paper"), minutes=16, any_length=("tiny",))
def first_updates(ask: Recipe) -> Iterator[Experiment]:
    """Repeats the ramp of the runs of branchnorm:8 with gradient norms at every update; at full size 100L-100L.

    C09 follows the norm without the branch weights from step to step. Inferred: the paper states neither model nor
    range; at full size the 4000 updates of its ramp, at scale tiny the whole ramp of the comparison, on one GPU 50L-50L
    and 100 updates without and with the warm-up of 4000.
    """
    if ask.tiny:
        yield from protocol.beginning(ask)
    elif ask.one_gpu:
        yield from one_gpu.beginning(ask)
    else:
        archs = ("postln", "deepnorm", "branchnorm", "branchnorm T=1")
        every_row = probing("grad_norm", every=1, update_every=10)
        yield from ask.runs(archs, [100], BRANCHNORM, every_row, {"train": {"steps": 4000}})
