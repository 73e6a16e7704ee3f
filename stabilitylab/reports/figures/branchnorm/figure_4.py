"""BranchNorm, Figure 4: quality over the training, and the number of updates to given levels for each architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ....experiments import Experiment, Recipe, command, probing, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ... import style
from ...arrange import apart
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Spread, figure
from ...claims import NAMED_LATER, Effect, claim
from ...collection import Record, Runs, pairs
from ...measures.by_label import by_label
from ...measures.comparison import ENOUGH, comparable, counted, failed, last_nll, not_drawn, states
from ...measures.layers import held_out_panel
from ...measures.loss_differences import between_architectures, measured
from ...measures.provenance import provenance
from ...measures.quality import curve, mean_nll, quality

ABLATION = "branchnorm T=1"  # Post-LN drawn as DeepNorm: BranchNorm without its ramp
SHOWN = ("deepnorm", "branchnorm", ABLATION, "postln gain=1", "deepnorm alpha-only gain=1")
LEVEL = 0.5  # nats between two levels


def first_update(record: Record, level: float) -> float:
    """Return the update at which the held-out nll first falls to ``level``, by linear interpolation between
    measurements; NaN if it never does."""
    steps, nll = curve(record)
    below = np.flatnonzero(nll <= level)
    if not len(below):
        return math.nan
    place = int(below[0])
    if place == 0:
        return float(steps[0])
    share = (nll[place - 1] - level) / (nll[place - 1] - nll[place])
    return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))


@figure("branchnorm:4", title="Quality over the training", source="BranchNorm, Figure 4")
class QualityOverUpdates(Figure):
    """The held-out cross-entropy [nats/token] after each number of updates, seed by seed against DeepNorm, and the
    first update at which it falls to given levels (linear between measurements). If the runs were evaluated, BLEU.

    Inferred: the paper has test BLEU of checkpoints from 20,000 updates on, and says "better" without a measure of it.
    BranchNorm without a ramp (T = 1) is drawn beside the two: a difference that it shows too is not due to the ramp. A
    Post-LN of Xavier gain 1 and a model with DeepNorm's alpha alone are drawn if they were trained.
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        levels = _levels(group)
        panels = [held_out_panel(group), _against_deepnorm(group), _reached(group, levels), *_bleu(group)]
        panels = [panel for panel in panels if panel.series]
        notes = [f"Drawn: {group.describe()}. Lines are means over seeds, bands their range.", *states(group)]
        if len(group) > len(trained := group.where(lambda run: not failed(run))):
            notes.append("Differences and first updates are those of the runs that trained.")
        if ABLATION not in group.labels:
            notes.append(f"Without the ablation {style.title(ABLATION)}: '{command(self.id)}' makes it.")
        notes += not_drawn(
            len(runs.where(kind="train", label=SHOWN)) - len(group), "of them with other settings, or without an end"
        )
        main, controls = apart(panels, SHOWN[:2])
        columns = 3 if len(panels) == 3 else 2
        return Picture(
            main, _finding(trained, levels), notes, columns=columns, controls=controls, provenance=provenance(group)
        )


def _group(runs: Runs) -> Runs:
    """Return DeepNorm and BranchNorm trained longest at the same settings, with enough seeds of both."""
    ended = runs.where(lambda run: run.ended and len(run.held_out()) > 1, kind="train", label=SHOWN)
    both = [(group, pairs(*(group.where(label=label) for label in SHOWN[:2]))) for group in comparable(ended)]
    both = [(group, compared) for group, compared in both if compared]
    if not both:
        raise MissingRuns(
            "no deepnorm and branchnorm that ended with the same seeds and settings", command("branchnorm:4")
        )

    def weight(one: tuple[Runs, Sequence[object]]) -> tuple[float, ...]:
        group, compared = one
        return min(ENOUGH, len(compared)), group[0].updates, group[0].depth, len(group.labels), len(compared)

    return max(both, key=weight)[0]


def _against_deepnorm(group: Runs) -> Panel:
    """Return each label minus DeepNorm, for runs with one seed, where both were measured."""
    trained = group.where(lambda run: not failed(run))
    lines = []
    for label in SHOWN[1:]:
        spread = Spread()
        for _, one, other in pairs(trained.where(label=label), trained.where(label="deepnorm")):
            mine, theirs = (dict(zip(*map(np.ndarray.tolist, curve(record)), strict=True)) for record in (one, other))
            steps = sorted(mine.keys() & theirs.keys())
            spread.add(steps, [mine[step] - theirs[step] for step in steps])
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label))
    zero = Reference(0.0, "equal to DeepNorm")
    return Panel("Against DeepNorm", "update", "difference in held-out nll [nats]", lines, [zero])


def _levels(group: Runs) -> list[float]:
    """Return the multiples of half a nat that every trained run reaches from above; [] if there are none."""
    curves = [curve(run)[1] for run in group if not failed(run)]
    if not curves:
        return []
    highest, lowest = min(nll[0] for nll in curves), max(float(np.min(nll)) for nll in curves)
    places = range(math.ceil(lowest / LEVEL), math.ceil(highest / LEVEL))
    return [LEVEL * place for place in reversed(places)]


def _reached(group: Runs, levels: Sequence[float]) -> Panel:
    trained = group.where(lambda run: not failed(run))
    lines = by_label(trained, lambda run: {level: first_update(run, level) for level in levels})
    title = "Updates until a loss is reached"
    return Panel(title, "held-out nll [nats/token]", "update", lines, ticks=sorted(levels))


def _bleu(group: Runs) -> list[Panel]:
    """Return BLEU at the update of the evaluation; [] unless all runs were evaluated alike."""
    scores = quality(group)
    if not scores.is_bleu:
        return []
    found = by_label(group, lambda run: {run.status.step: scores.values[run.name]})
    points = [replace(one, kind="points") for one in found]
    return [Panel("BLEU after training", "update", "BLEU", points)]


def _finding(trained: Runs, levels: Sequence[float]) -> str:
    parts = []
    for level in dict.fromkeys(levels[place] for place in (len(levels) // 2, -1) if levels):
        updates = {
            label: float(np.mean([first_update(run, level) for run in own]))
            for label in SHOWN
            if len(own := trained.where(label=label))
        }
        said = ", ".join(f"{style.title(label)} after {update:.0f}" for label, update in updates.items())
        parts.append(f"{level:g} nats: {said}")
    reached = f"Held-out loss down to {'; to '.join(parts)} updates. " if parts else ""
    ends = []
    for label in SHOWN[1:]:
        compared = pairs(trained.where(label=label), trained.where(label="deepnorm"))
        if gaps := [last_nll(a) - last_nll(b) for _, a, b in compared]:
            ends.append(f"{style.title(label)} {measured(gaps)} nats from DeepNorm ({counted(len(gaps))})")
    return f"{reached}At the end {'; '.join(ends)}." if ends else f"{reached}No two runs of one seed both trained."


@claim(
    "C37",
    figure="branchnorm:4",
    stage="after training",
    paper="BranchNorm",
    sentence="BranchNorm ends with a lower loss than DeepNorm at all depths",
    source="BranchNorm, Tables 1-3 and Fig. 4",
    statistic="final held-out nll, BranchNorm - DeepNorm [nats], mean over depths; beside it each depth, and what the "
    "ramp and what alpha does: BranchNorm - (T = 1) and (T = 1) - DeepNorm",
    threshold="R: < -.01; X: > .01",
    sweep="branchnorm:4",
    pilot="+.24 and +.30 (6L, 400 steps); the ablation -.42",
    after=NAMED_LATER,
)
def lower_final_loss(runs: Runs) -> list[Effect]:
    return between_architectures(runs, "branchnorm", "deepnorm", ABLATION, "difference")


@claim(
    "C47",
    figure="branchnorm:4",
    stage="after training",
    paper="BranchNorm",
    sentence="BranchNorm is ahead of DeepNorm over the training as a whole",
    source="BranchNorm, Fig. 4: its curve lies above DeepNorm's",
    statistic="mean over updates of the held-out nll (the area under it, by trapezoids, over the number of updates), "
    "BranchNorm - DeepNorm [nats], mean over depths; beside it what stands beside C37",
    threshold="R: < -.01; X: > .01 (the margin of C37)",
    sweep="branchnorm:4",
    kind="implied",
    after=f"it was set when the final losses of the same runs were known; {NAMED_LATER}",
)
def ahead_over_the_training(runs: Runs) -> list[Effect]:
    return between_architectures(runs, "branchnorm", "deepnorm", ABLATION, "mean difference", mean_nll)


@sweep("branchnorm:4", minutes=367, folder="branchnorm:8", any_length=("tiny",))
def curves_of_the_comparison(ask: Recipe) -> Iterator[Experiment]:
    """Takes the runs of branchnorm:8; at full size trains 50L-50L, with the ablation that has no ramp."""
    if ask.tiny:
        yield from protocol.main(ask)
    else:
        yield from ask.runs(("deepnorm", "branchnorm", ABLATION), [50], BRANCHNORM, probing())
