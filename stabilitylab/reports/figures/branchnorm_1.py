"""BranchNorm, Figure 1: what DeepNorm costs where a plain Post-LN trains as well."""

from __future__ import annotations

import math

import numpy as np

from ...experiments import command
from .. import style
from ..base import Figure, MissingRuns, Panel, Picture, Reference, Series, Spread, figure
from ..claims import Effect, claim
from ..collection import LAYERS, Runs, pairs
from ..layerwise import comparable, counted, failed, last_nll, states
from ..statistics import Region, signed_rank, slope
from .branchnorm_5 import Quality, even, quality
from .loss_differences import Gaps, gaps_of, measured, weight
from .outcomes import outcomes, worst

BOTH = ("postln", "deepnorm")


def _sweeps(runs: Runs) -> list[tuple[Runs, Gaps]]:
    """Comparable runs of both, with DeepNorm's final nll minus Post-LN's where both trained, best last: gaps at
    several depths, which alone can grow, come before a longer training."""
    groups = comparable(runs.where(even, kind="train", label=BOTH), *LAYERS)
    both = [group for group in groups if len(group.labels) == len(BOTH)]
    found = [(group, gaps_of(group.where(lambda run: not failed(run)), "deepnorm", "postln")) for group in both]
    return sorted(found, key=lambda one: (len(one[1]) > 1, bool(one[1]), *weight(*one)))


@figure("branchnorm:1", title="Gap between DeepNorm and Post-LN", source="BranchNorm, Figure 1")
class GapToPostLN(Figure):
    """Quality after training against depth, and DeepNorm's loss of quality against Post-LN seed by seed.

    BLEU of ``stabilitylab evaluate`` where all models reach 5 (gap: Post-LN minus DeepNorm), else held-out nll in nats
    a token (gap: DeepNorm minus Post-LN): above 0 DeepNorm is the worse one. The gap is over pairs of runs that both
    trained; runs that diverged or are stuck are crosses. Inferred: the paper has one converged run a depth, in BLEU.
    """

    def picture(self, runs: Runs) -> Picture:
        ended = runs.where(lambda run: run.ended and not math.isnan(last_nll(run)))
        sweeps = _sweeps(ended)
        if not sweeps:
            raise MissingRuns("no postln and deepnorm that ended at the same settings", command(self.id))
        group, _ = sweeps[-1]
        scores = quality(group)
        gaps = _gaps(group, scores)
        bad = 0.0 if scores.is_bleu else worst(group, scores.values)
        levels = [
            line
            for label in BOTH
            for line in outcomes(group.where(label=label), scores.values, lambda run: run.depth,
                                 style.title(label), bad=bad, arch=label)
        ]  # fmt: skip
        look = {"log_x": True, "ticks": group.depths}
        panels = [Panel("Quality", "layers a side", scores.axis, levels, **look)]
        if gaps:
            zero = Reference(0.0, "equal")
            panels.append(Panel("Gap", "layers a side", f"gap to Post-LN [{_unit(scores)}]", [_line(gaps)], [zero],
                                **look))  # fmt: skip
        notes = [f"Drawn: {group.describe()}. Points are means over seeds, bands their range.", *states(group)]
        notes += [_lost(group, label) for label in BOTH if any(map(failed, group.where(label=label)))]
        if not scores.is_bleu:
            notes.append("Held-out nll (lower is better) stands in for BLEU, which not every model has and has 5 of.")
        if others := len(runs.where(kind="train", label=BOTH)) - len(group):
            notes.append(f"Not drawn: {others} run{'s' * (others > 1)} of them with other settings, or without an end.")
        return Picture(panels, _finding(gaps, _unit(scores)), notes)


def _unit(scores: Quality) -> str:
    return "BLEU" if scores.is_bleu else "nats/token"


def _gaps(group: Runs, scores: Quality) -> Gaps:
    """Post-LN's quality minus DeepNorm's, by depth and seed, where both trained."""
    gaps: Gaps = {}
    trained = group.where(lambda run: not failed(run))
    for depth in group.depths:
        one, other = (trained.where(lambda run, d=depth: run.depth == d, label=label) for label in BOTH)
        if found := {seed: scores.gain(a) - scores.gain(b) for seed, a, b in pairs(one, other)}:
            gaps[depth] = found
    return gaps


def _line(gaps: Gaps) -> Series:
    spread = Spread()
    for depth, by_seed in gaps.items():
        for value in by_seed.values():
            spread.add([depth], [value])
    return spread.series("DeepNorm's gap to Post-LN", arch="deepnorm", dash="dashed")


def _lost(group: Runs, label: str) -> str:
    """At which depths the runs of a label failed, of how many."""
    own = group.where(label=label)
    found = []
    for depth in own.depths:
        here = own.where(lambda run, d=depth: run.depth == d)
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
    """Seed -> least-squares slope of its gap with depth, of seeds that have all depths; none for one depth."""
    if len(gaps) < 2:
        return {}
    seeds = sorted(set.intersection(*map(set, gaps.values())))
    return {seed: slope([*gaps], [gaps[depth][seed] for depth in gaps]) for seed in seeds}


@claim(
    "C36",
    figure="branchnorm:1",
    paper="BranchNorm",
    sentence="DeepNorm is under-trained against Post-LN where both converge, and the gap grows with depth",
    source="BranchNorm, Fig. 1",
    statistic="final held-out nll, DeepNorm - Post-LN [nats], at each depth where both trained; its slope with depth. "
    "Of several comparable groups one with two depths or more, then the one trained longest",
    threshold="R: gap > 0 at every depth and slope > 0; X: gap < 0 at some depth, or slope < 0 (the plan names no X: "
    "ours)",
    sweep="branchnorm:1",
)
def undertrained_deepnorm(runs: Runs) -> list[Effect]:
    gaps = next((gaps for _, gaps in reversed(_sweeps(runs)) if gaps), {})
    if not gaps:
        raise MissingRuns("needs deepnorm and postln that trained at several depths with the same seeds and settings")
    found = [
        Effect(f"gap at {depth}L", values, Region(low=0), Region(high=0), p=signed_rank([*values.values()]))
        for depth, values in gaps.items()
    ]
    if len(gaps) == 1:  # shows the gap, which may refute the claim, but not that it grows
        return [*found, Effect("slope of the gap (needs two depths)", {}, Region(low=0), Region(high=0))]
    return [*found, Effect("slope of the gap per layer", _slopes(gaps), Region(low=0), Region(high=0))]
