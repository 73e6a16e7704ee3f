"""BranchNorm, Figure 1: DeepNorm's loss of quality where a plain Post-LN trains as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from ....experiments import SEEDS, Experiment, Recipe, command, probing, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ... import style
from ...base import Figure, MissingRuns, Panel, Picture, Reference, figure
from ...claims import NAMED_LATER, Effect, claim, together
from ...collection import LAYERS, Record, Runs
from ...conditions import CONVERGED, last_fall
from ...measures.comparison import comparable, counted, failed, last_nll, not_drawn, states
from ...measures.gains import WORDS, by_gain
from ...measures.loss_differences import Gaps, behind, gap_line, gaps_of, measured, weight
from ...measures.outcomes import outcomes, worst
from ...measures.provenance import provenance
from ...measures.quality import Quality, even, quality
from ...statistics import Region, slope

DEEPNORM = "deepnorm"
POST_LNS = [f"postln{ending}" for ending in WORDS]  # of gain 1, and fairseq's


def _sweeps(runs: Runs, postln: str, fit: Callable[[Record], bool]) -> list[tuple[Runs, Gaps]]:
    """Return comparable runs of both, with DeepNorm's final nll minus Post-LN's between those that ``fit``, best last:
    gaps at several depths, which alone can grow, come before a longer training."""
    groups = comparable(runs.where(even, kind="train", label=(postln, DEEPNORM)), *LAYERS)
    both = [group for group in groups if len(group.labels) == 2]
    found = [(group, gaps_of(group.where(fit), DEEPNORM, postln)) for group in both]
    return sorted(found, key=_rank)


def _rank(found: tuple[Runs, Gaps]) -> tuple[float, ...]:
    return len(found[1]) > 1, bool(found[1]), *weight(*found)


def _trained(run: Record) -> bool:
    return not failed(run)


def _converged(run: Record) -> bool:
    return not failed(run) and last_fall(run) < CONVERGED


@figure("branchnorm:1", title="Gap between DeepNorm and Post-LN", source="BranchNorm, Figure 1")
class GapToPostLN(Figure):
    """The quality after training against depth, and DeepNorm's loss of quality against Post-LN, seed by seed.

    The quality is BLEU of ``stabilitylab evaluate`` if all models reach 5 (gap: Post-LN minus DeepNorm), otherwise
    held-out nll in nats a token (gap: DeepNorm minus Post-LN). Above 0, DeepNorm is the worse one. The gap is over
    pairs of runs that both trained; runs that diverged or are stuck are crosses. Inferred: the paper has one converged
    run per depth, in BLEU.
    """

    def picture(self, runs: Runs) -> Picture:
        ended = runs.where(lambda run: run.ended and not math.isnan(last_nll(run)))
        sweeps = [(found, label) for label in reversed(POST_LNS) for found in _sweeps(ended, label, _trained)]
        if not sweeps:
            raise MissingRuns("no postln and deepnorm that ended at the same settings", command(self.id))
        (group, _), postln = max(reversed(sweeps), key=lambda one: _rank(one[0]))
        labels = (postln, DEEPNORM)
        scores = quality(group)
        gaps = gaps_of(group.where(_trained), *labels, scores.gain)
        bad = 0.0 if scores.is_bleu else worst(group, scores.values)
        levels = [
            line
            for label in labels
            for line in outcomes(group.where(label=label), scores.values, lambda run: run.depth,
                                 style.title(label), bad=bad, arch=label)
        ]  # fmt: skip
        look = {"log_x": True, "ticks": group.depths}
        panels = [Panel("Quality", "layers a side", scores.axis, levels, **look)]
        if gaps:
            line = gap_line(gaps, "DeepNorm's gap to Post-LN", arch=DEEPNORM, dash="dashed")
            unit = f"gap to Post-LN [{_unit(scores)}]"
            panels.append(Panel("Gap", "layers a side", unit, [line], [Reference(0.0, "equal")], **look))
        notes = [f"Drawn: {group.describe()}. Points are means over seeds, bands their range.", *states(group)]
        notes += [_lost(group, label) for label in labels if any(map(failed, group.where(label=label)))]
        if not scores.is_bleu:
            notes.append("Held-out nll (lower is better) stands in for BLEU, which not every model has and has 5 of.")
        notes += not_drawn(
            len(runs.where(kind="train", label=(*POST_LNS, DEEPNORM))) - len(group),
            "of them with other settings, or without an end",
        )
        return Picture(panels, _finding(gaps, _unit(scores)), notes, provenance=provenance(group))


def _unit(scores: Quality) -> str:
    return "BLEU" if scores.is_bleu else "nats/token"


def _lost(group: Runs, label: str) -> str:
    """Say at which depths runs of a label failed, and the number of runs there."""
    own = group.where(label=label)
    found = []
    for depth in own.depths:
        here = own.where(depth=depth)
        if lost := sum(map(failed, here)):
            found.append(f"{lost} of {len(here)} at {depth} layers a side")
    return f"{style.title(label)} diverged or is stuck in {', '.join(found)}."


def _finding(gaps: Gaps, unit: str) -> str:
    if not gaps:
        return "At no depth did DeepNorm and Post-LN both train, so there is no gap to measure."
    parts = [f"{np.mean([*by_seed.values()]):+.3f} at {depth}" for depth, by_seed in gaps.items()]
    seeds = sorted({seed for by_seed in gaps.values() for seed in by_seed})
    said = f"DeepNorm's gap to Post-LN is {', '.join(parts)} layers a side [{unit}] ({counted(len(seeds))})"
    if len(gaps) == 1:
        return f"{said}; one depth cannot show that it grows."
    if not (slopes := _slopes(gaps)):
        return f"{said}; no seed has all depths, so its growth is not measured."
    return f"{said}; with each layer it changes by {measured(slopes.values(), '+.4f')} ({counted(len(slopes))})."


def _slopes(gaps: Gaps) -> dict[int, float]:
    """Fit each seed's gap with depth by least squares, for seeds that have all depths; {} for one depth."""
    if len(gaps) < 2:
        return {}
    seeds = sorted(set.intersection(*map(set, gaps.values())))
    return {seed: slope([*gaps], [gaps[depth][seed] for depth in gaps]) for seed in seeds}


@claim(
    "C36",
    figure="branchnorm:1",
    stage="after training",
    paper="BranchNorm",
    sentence="DeepNorm is under-trained against Post-LN where both converge, and the gap grows with depth",
    source="BranchNorm, Fig. 1",
    statistic="final held-out nll, DeepNorm - Post-LN of Xavier gain 1 (without such runs of fairseq's gain, which "
    "else stands beside it) [nats], mean over the depths at which both converged: over the last fifth of the updates "
    "their held-out loss fell by less than .01 nats; beside it each depth, and the gap's slope with depth. Of several "
    "comparable groups one with two depths or more, then the one trained longest",
    threshold="R: mean gap > 0; X: < 0 (the plan names no X: ours)",
    sweep="branchnorm:1",
    after=NAMED_LATER,
)
@by_gain
def undertrained_deepnorm(runs: Runs, gain: str) -> list[Effect]:
    postln = f"postln{gain}"
    group, gaps = next(
        ((group, gaps) for group, gaps in reversed(_sweeps(runs, postln, _converged)) if gaps), (Runs([]), {})
    )
    if not gaps:
        lacking = f"needs deepnorm and {postln} that converged with the same seeds and settings"
        raise MissingRuns(lacking + _fell(runs, postln))
    own = [
        Effect(f"gap at {depth}L", values, of=behind(group, depth, values, DEEPNORM, postln))
        for depth, values in gaps.items()
    ]
    mean = together("mean gap over depths", own, np.mean, Region(low=0), Region(high=0))
    slopes = _slopes(gaps)
    return [mean, *own, *([Effect("slope of the gap per layer", slopes, of=mean.of)] if slopes else [])]


def _fell(runs: Runs, postln: str) -> str:
    """Say how much the loss of the trained runs still fell, in the group that comes nearest."""
    group = next((group for group, gaps in reversed(_sweeps(runs, postln, _trained)) if gaps), Runs([]))
    falls = [fall for run in group.where(_trained) if math.isfinite(fall := last_fall(run))]
    if not falls:
        return ""
    return (
        f": over the last fifth of {group[0].updates:,} updates the held-out loss still fell by {min(falls):.2g} to "
        f"{max(falls):.2g} nats (converged: less than {CONVERGED:g})"
    )


@sweep("branchnorm:1", minutes=172, folder={"tiny": "branchnorm:8"}, any_length=("tiny",))
def shallow_models(ask: Recipe) -> Iterator[Experiment]:
    """Takes Post-LN (gain 1) and DeepNorm from the runs of branchnorm:8; at full size trains both up to 30 layers a
    side."""
    if ask.tiny:
        yield from protocol.main(ask, only=(protocol.POST, protocol.DEEP))
    else:
        depths = (6, 12, 18, 24, 30)
        yield from ask.runs(("postln", "deepnorm"), depths, BRANCHNORM, probing("branch_variance"), seeds=SEEDS[:3])
