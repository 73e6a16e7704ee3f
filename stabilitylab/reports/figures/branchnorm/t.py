"""BranchNorm, Section 5.1: the effect of the length of alpha's ramp."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ....experiments import SEEDS, Experiment, Recipe, command, probing, protocol, sweep
from ....experiments.recipe import BRANCHNORM
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, figure
from ...claims import NAMED_LATER, Effect, claim, described
from ...collection import Record, Runs, pairs
from ...measures.comparison import counted, failed, last_nll, not_drawn, states
from ...measures.loss_differences import EQUIVALENT, Gaps, every_two, gap_line, measured, of_values, ramped
from ...measures.outcomes import outcomes, worst
from ...measures.provenance import provenance
from ...style import DASHES, of_amounts

RAMP, RATE = "model.T", "train.lr"
LONGEST_RAMP = 0.2  # share of the run: the paper's largest T
MARKERS = "Dos^"  # of learning rates, lowest first


@figure("branchnorm:T", title="Length of alpha's ramp", source="BranchNorm, Section 5.1")
class LengthOfRamp(Figure):
    """The held-out nll after training [nats/token] against T, the number of updates until alpha is 1, for each learning
    rate. Beside it is the difference, seed by seed, to the shortest ramp (of two updates or more) on which models
    trained, with the margin of equivalence.

    The paper has T of 100, 400, 4000 and 20000 in 100,000 updates, and no number. T = 1 is no ramp at all. Inferred:
    its T as shares of the run, and two learning rates, since a larger rate needs a longer ramp. All differences are to
    one ramp, if models trained on it at every rate.
    """

    def picture(self, runs: Runs) -> Picture:
        group = _group(runs)
        rates = sorted({_rate(run) for run in group})
        values = {run.name: last_nll(run) for run in group}
        bad = worst(group, values)
        shared = _shared([group.where(lambda run, r=rate: _rate(run) == r) for rate in rates])
        ends: list[Series] = []
        differences: list[Series] = []
        said = []
        for place, rate in enumerate(rates):
            own = group.where(lambda run, r=rate: _rate(run) == r)
            marker = MARKERS[place % len(MARKERS)]
            look = {
                "colour": of_amounts(len(rates))[place],
                "dash": DASHES[place % len(DASHES)],
            }
            name = f"lr {rate:g}"
            ends += outcomes(own, values, _ramp, name, bad=bad, marker=marker, **look)
            base, gaps = _differences(own, shared)
            if gaps:
                differences.append(gap_line(gaps, name, marker=marker, **look))
            said.append(_said(name, base, gaps, own))
        fifth = Reference(LONGEST_RAMP * group[0].updates, "1/5 of the run", vertical=True)
        ramps = sorted({_ramp(run) for run in group})
        beyond = [fifth] if ramps[-1] > fifth.value else []
        look = {"log_x": True, "ticks": ramps}
        panels = [Panel("After training", "T [updates]", "held-out nll [nats/token]", ends, beyond, **look)]
        if differences:
            limits = [  # one name for all three, which lie close together if the ramp matters
                Reference(EQUIVALENT, f"the shortest ramp, {EQUIVALENT:g} on either side"),
                Reference(0.0, ""),
                Reference(-EQUIVALENT, ""),
            ]
            y = "difference in final nll [nats]"
            panels.append(
                Panel("Against the shortest ramp, with the margin", "T [updates]", y, differences, limits, **look)
            )
        notes = [f"Drawn: {group.describe()}. Points are means over seeds, bands their range.", *states(group)]
        notes += not_drawn(len(ramped(runs)) - len(group), "of BranchNorm with other settings")
        finding = "; ".join(said)
        margin = f"The margin of equivalence is {EQUIVALENT:g} nats."
        said = f"{finding[0].upper()}{finding[1:]}. {margin}"
        return Picture(panels, said, notes, provenance=provenance(group))


def _ramp(record: Record) -> int:
    return int(record.settings[RAMP])


def _rate(record: Record) -> float:
    return float(record.settings[RATE])


def _group(runs: Runs) -> Runs:
    """Return linear ramps that differ only in T and learning rate, at learning rates with two T or more: with most T at
    one learning rate, then most learning rates, then most runs."""
    linear = ramped(runs).where(lambda run: run.ended and not math.isnan(last_nll(run)), model__growth="linear")
    found = []
    for group in linear.groups(RAMP, RATE):
        ramps: dict[float, set[int]] = {}
        for run in group:
            ramps.setdefault(_rate(run), set()).add(_ramp(run))
        several = {rate: own for rate, own in ramps.items() if len(own) > 1}
        if several:
            kept = group.where(lambda run, several=several: _rate(run) in several)
            found.append((max(map(len, several.values())), len(several), len(kept), kept))
    if not found:
        raise MissingRuns("no runs of branchnorm that differ in T alone", command("branchnorm:T"))
    return max(found, key=lambda one: one[:3])[3]


def _trained(own: Runs) -> list[int]:
    return sorted({_ramp(run) for run in own if not failed(run)})


def _shared(rates: Sequence[Runs]) -> int:
    """Return the shortest ramp (of two updates or more) on which models trained at every rate; 0 if there is none."""
    common = set.intersection(*({*_trained(own)} for own in rates))
    return min((T for T in common if T > 1), default=0)


def _differences(own: Runs, shared: int) -> tuple[int, Gaps]:
    """Return the ramp of reference and the difference of each T to it. The reference is the ``shared`` ramp, or without
    it the shortest on which models trained; T = 1 only if it is the only one."""
    trained = own.where(lambda run: not failed(run))
    ramps = _trained(own)
    if not ramps:
        return 0, {}
    base = shared or next((T for T in ramps if T > 1), ramps[0])
    at_base = trained.where(model__T=base)
    gaps = {
        T: {seed: last_nll(a) - last_nll(b) for seed, a, b in pairs(trained.where(model__T=T), at_base)} for T in ramps
    }
    return base, {T: by_seed for T, by_seed in gaps.items() if by_seed}


def _said(name: str, base: int, gaps: Gaps, own: Runs) -> str:
    """Name the T whose mean differs most from the reference, with its interval."""
    others = {T: [*by_seed.values()] for T, by_seed in gaps.items() if base != T}
    if not others:
        return f"at {name} no two ramps trained with the same seeds ({sum(map(failed, own))} of {len(own)} runs failed)"
    T, found = max(others.items(), key=lambda one: abs(np.mean(one[1])))
    return (
        f"at {name} T from {min(gaps)} to {max(gaps)} moves the final loss by at most {measured(found)} nats "
        f"(T = {T} against {base}, {counted(len(found))})"
    )


@claim(
    "C38",
    figure="branchnorm:T",
    stage="after training",
    paper="BranchNorm",
    sentence="The result is insensitive to T in {100, 400, 4000, 20000}",
    source="BranchNorm, Sec. 5.1",
    statistic="final held-out nll at the longest T minus that at the shortest of four T or more [nats], T up to a "
    "fifth of the run, as the paper's 20000 of 100000, at the lowest learning rate with four such T; beside it each "
    "other two, at each such learning rate",
    threshold="R: within .05 of 0 (equivalence); X: beyond .05",
    sweep="branchnorm:T",
    after=f"{NAMED_LATER}; so were the limit of a fifth of the run, and which learning rates count",
)
def insensitive_to_t(runs: Runs) -> list[Effect]:
    within = runs.where(lambda run: run.settings[RAMP] <= LONGEST_RAMP * run.updates, kind="train")
    effects: list[Effect] = []
    lacking = MissingRuns("no runs of branchnorm with a ramp of at most a fifth of the run")
    for rate in sorted({_rate(run) for run in within}):
        try:
            found = of_values(within.where(lambda run, r=rate: _rate(run) == r), RAMP, 4)
        except MissingRuns as missing:
            lacking = missing
            continue
        own = every_two(found, RAMP, (max(found), min(found)), f" at lr {rate:g}")
        effects += map(described, own) if effects else own
    if not effects:
        raise lacking
    return effects


@sweep("branchnorm:T", minutes=130, any_length=("tiny",))
def lengths(ask: Recipe) -> Iterator[Experiment]:
    """Varies T over the paper's .1, .4, 4 and 20 % of the run, 18L-18L, 3000 updates; at full size also at thrice
    the learning rate."""
    if ask.tiny:
        yield from protocol.ramps(ask)
        return
    for rate, seeds in ((5e-4, ()), (1.5e-3, SEEDS[:3])):
        for T in (100, 400, 4000, 20_000):
            yield from full_size_ramp(ask, T, rate, seeds=seeds)


def full_size_ramp(
    ask: Recipe, T: int, lr: float, *, growth: str = "linear", seeds: Sequence[int] = ()
) -> Iterator[Experiment]:
    """Trains BranchNorm at full size with one ramp."""
    own = {"model": {"T": T, "growth": growth}, "train": {"lr": lr}}
    yield from ask.runs(["branchnorm"], [100], BRANCHNORM, probing(), own, seeds=seeds, tag=f"T{T}-lr{lr:g}")
