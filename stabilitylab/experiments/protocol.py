"""The runs of Protocols 2 and 3, by which architectures are compared: ramps of 4 % of the run, and an own learning rate
for each architecture.

T = warm-up = 4 % of the run (the BranchNorm paper has 4,000 of 100,000 updates); then a linear decay to 0. In Protocol
2 each arm trains at the learning rate that is best for it on seeds 100 and 101 in runs of a quarter of the length;
seeds 3 to 8 are judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..config import resolve
from ..labels import label
from .recipe import CONTROLS, Experiment, Recipe, Settings, figure_config, name_of, probing, slug

RAMP = 0.04  # of the run: warm-up, and BranchNorm's T (the paper's 4,000 of 100,000 updates)
POST, SMALL, DEEP, BRANCH = ARMS = ("postln gain=1", "branchnorm T=1", "deepnorm", "branchnorm")
PRE = "preln"
ALPHA_ALONE = "deepnorm alpha-only gain=1"  # beside them, at 6 layers a side
LAYERS = (6, 18)  # a side
UPDATES, CHOICE_UPDATES, RAMP_UPDATES = 6000, 1500, 3000
SEEDS, CHOICE_SEEDS = (3, 4, 5, 6, 7, 8), (100, 101)
RATES = (5e-4, 1e-3, 2e-3, 4e-3)  # to choose from; a best rate at either end is followed by its half or double
LEAST_RATE, MOST_RATE = RATES[0] / 16, RATES[-1] * 16
# Arm -> layers a side -> rate; results/tiny/second/choice.csv has the losses that chose it.
CHOSEN: Mapping[str, Mapping[int, float]] = {
    POST: {6: 1e-3, 18: 2.5e-4},
    SMALL: {6: 2e-3, 18: 2e-3},
    DEEP: {6: 4e-3, 18: 4e-3},
    BRANCH: {6: 4e-3, 18: 1e-3},
    ALPHA_ALONE: {6: 2e-3},
}
SHARES = (0.001, 0.004, 0.04, 0.2)  # the paper's T of 100, 400, 4,000 and 20,000 of its 100,000 updates
DEEPEST, DEEPEST_RATES, DEEPEST_RAMPS = 100, (3e-4, 1e-3), (1, 6, 100)  # layers a side; T of 160 updates
WITH_LAYERS = probing("default", "branch_variance")


def arms(layers: int) -> tuple[str, ...]:
    """Return the arms at ``layers`` a side."""
    return (*ARMS, ALPHA_ALONE) if layers == LAYERS[0] else ARMS


def share(updates: int, part: float = RAMP) -> int:
    """Return ``part`` of a run in updates, at least one."""
    return max(1, round(part * updates))


def chosen(arm: str, layers: int) -> float:
    """Return the learning rate of an arm. A depth without a chosen rate gets the rate of the nearest depth."""
    own = CHOSEN[arm]
    return own[min(own, key=lambda known: abs(math.log(known / layers)))]


def run(
    arm: str, layers: int, seed: int, rate: float, updates: int, *settings: Settings, tags: Sequence[str] = ()
) -> Experiment:
    """Return one run of ``arm``, ``layers`` a side, at learning rate ``rate``, with warm-up and T of 4 % of
    ``updates``.

    ``settings`` override these, but not the settings that define the arm, and not the seed.
    """
    common: dict[str, Any] = {
        "model": {"T": share(updates), "encoder_layers": layers, "decoder_layers": layers},
        "train": {"steps": updates, "warmup": share(updates), "schedule": "linear", "lr": rate},
    }
    own = {"model": CONTROLS[arm], "data": {"seed": seed}, "train": {"seed": seed}}
    config = resolve(common, *settings, own)
    return Experiment(name_of(config, f"lr{rate:g}", *tags), config)


def choice(
    layers: int, settings: Settings, rates: Mapping[str, tuple[float, ...]] | None = None
) -> Iterator[Experiment]:
    """Yield the runs from which the rate of each arm is chosen. ``rates``: arm -> rates in place of :data:`RATES`."""
    light: Settings = {"train": {"final_checkpoint": False}}
    for seed in CHOICE_SEEDS:
        for arm in arms(layers):
            for rate in RATES if rates is None else rates.get(arm, ()):
                yield run(arm, layers, seed, rate, CHOICE_UPDATES, settings, probing(), light)


# Protocol 3: the rates are searched on the schedule that is run, and models must read their source.
SEARCHED_RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
SEARCHED_ARMS = (POST, PRE, SMALL, DEEP, BRANCH)
RUNG_UPDATES = 2400  # of a schedule of UPDATES: from here on the losses rank the rates as at the end
CONFIRMING_SEEDS = (102, 103, 104, 105)


def searched(arm: str, layers: int, settings: Settings) -> Experiment:
    """Return a run from which a rate is searched, by its validation loss; its name has no rate and no seed."""
    found = run(arm, layers, CHOICE_SEEDS[0], SEARCHED_RATES[0], UPDATES, settings, probing())
    return Experiment(f"{slug(label(found.config.model))}-{found.config.model.depth}", found.config)


# results/tiny/rungs-choice.csv has the losses that chose these rates, by which Protocol 3 compares.
SEARCH: Mapping[str, Mapping[int, float]] = {
    POST: {6: 1e-3, 18: 1.77e-4},
    PRE: {6: 4e-3, 18: 2.83e-3},
    SMALL: {6: 2.83e-3, 18: 1.41e-3},
    DEEP: {6: 2e-3, 18: 1e-3},
    BRANCH: {6: 7.07e-4, 18: 3.54e-4},
}
JUDGED_SEEDS = tuple(range(3, 11))
HALVED_SEEDS = JUDGED_SEEDS[:4]


def judged(ask: Recipe, layers: int, arms: Sequence[str] = SEARCHED_ARMS) -> Iterator[Experiment]:
    """Yield the comparison of Protocol 3 at ``layers`` a side: each of ``arms`` at the rate that its search chose, seed
    by seed, so that the finished runs are paired. ``ask`` names the data whose validation set judges the runs; it must
    differ from the validation set of the search."""
    for seed in ask.seeds or JUDGED_SEEDS:
        for arm in arms:
            yield run(arm, layers, seed, SEARCH[arm][layers], UPDATES, WITH_LAYERS, ask.settings)


def halved(ask: Recipe, layers: int, arms: Sequence[str] = SEARCHED_ARMS) -> Iterator[Experiment]:
    """Yield half of the seeds of :func:`judged` at half the rates, to see if its answers depend on the rate."""
    for seed in ask.seeds or HALVED_SEEDS:
        for arm in arms:
            yield run(arm, layers, seed, SEARCH[arm][layers] / 2, UPDATES, probing(), ask.settings)


def searched_ramps(ask: Recipe) -> Iterator[Experiment]:
    """Yield BranchNorm, 18 layers a side, with the paper's T as shares of the run, at the rate that its search chose,
    at half of that rate, and at the rate of Protocol 2; warm-up stays 4 %."""
    found = SEARCH[BRANCH][18]
    for seed in ask.seeds or SEEDS:
        for rate in dict.fromkeys((found, found / 2, CHOSEN[BRANCH][18])):
            for part in SHARES:
                T = share(RAMP_UPDATES, part)
                own: Settings = {"model": {"T": T}}
                yield run(BRANCH, 18, seed, rate, RAMP_UPDATES, probing(), ask.settings, own, tags=[f"T{T}"])


def best(losses: Mapping[float, float]) -> tuple[float, float | None]:
    """Return the rate of the smallest loss, and the rate to try next if the best rate is the lowest or highest one.

    A loss of inf or NaN counts as the worst. None: the choice is made, or the next rate would lie beyond
    ``LEAST_RATE`` and ``MOST_RATE``.
    """
    chosen = min(losses, key=lambda rate: (not losses[rate] < float("inf"), losses[rate]))
    if chosen == min(losses) and chosen / 2 >= LEAST_RATE:
        return chosen, chosen / 2
    if chosen == max(losses) and chosen * 2 <= MOST_RATE:
        return chosen, chosen * 2
    return chosen, None


def length(ask: Recipe, usual: int) -> tuple[int, list[str]]:
    """Return the number of updates that ``ask`` asks for, and the tags that mark an unusual number in names of runs."""
    return (usual, []) if ask.steps in (None, usual) else (int(ask.steps or usual), [f"steps{ask.steps}"])


def main(
    ask: Recipe, layers: Iterable[int] = tuple(reversed(LAYERS)), only: Sequence[str] = ()
) -> Iterator[Experiment]:
    """Yield the runs that compare all arms (or ``only`` these) at their own rates, seed by seed, so that the finished
    runs are paired; with the tables of Figures 8 and 9."""
    layers = tuple(layers)
    updates, tags = length(ask, UPDATES)
    for seed in ask.seeds or SEEDS:
        for depth in layers:
            for arm in arms(depth):
                if not only or arm in only:
                    rate = chosen(arm, depth)
                    yield run(arm, depth, seed, rate, updates, WITH_LAYERS, ask.settings, tags=tags)


def lower(ask: Recipe) -> Iterator[Experiment]:
    """Yield DeepNorm and BranchNorm, 6 layers a side, at a quarter of their chosen rates.

    Planned after the encoders of the runs of :func:`main` had collapsed, to see if they also collapse at a lower rate.
    These runs decide no claim.
    """
    for seed in ask.seeds or SEEDS[:3]:
        for arm in (DEEP, BRANCH):
            yield run(arm, 6, seed, chosen(arm, 6) / 4, UPDATES, WITH_LAYERS, ask.settings)


def beginning(ask: Recipe) -> Iterator[Experiment]:
    """Yield the ramps of the runs of :func:`main` with gradient norms in every row: their first 4 %, bit for bit, since
    the decay begins after the ramp."""
    updates, tags = length(ask, UPDATES)
    first: Settings = {"train": {"steps": share(updates), "warmup": share(updates), "final_checkpoint": False}}
    every_row = probing("grad_norm", every=1, update_every=10)
    for seed in ask.seeds or SEEDS:
        for depth in reversed(LAYERS):
            for arm in ARMS:
                rate = chosen(arm, depth)
                yield run(arm, depth, seed, rate, updates, every_row, ask.settings, first, tags=tags)


def ramps(ask: Recipe) -> Iterator[Experiment]:
    """Yield BranchNorm, 18 layers a side, with the paper's T as shares of the run; warm-up stays 4 %."""
    updates, tags = length(ask, RAMP_UPDATES)
    for seed in ask.seeds or SEEDS:
        for part in SHARES:
            T = share(updates, part)
            own: Settings = {"model": {"T": T}}
            rate = chosen(BRANCH, 18)
            yield run(BRANCH, 18, seed, rate, updates, WITH_LAYERS, ask.settings, own, tags=[f"T{T}", *tags])


def growths(ask: Recipe) -> Iterator[Experiment]:
    """Yield BranchNorm, 6 layers a side, with three shapes of alpha's ramp, 4 % of the run long."""
    updates, tags = length(ask, RAMP_UPDATES)
    for seed in ask.seeds or SEEDS:
        for growth in ("linear", "exp", "sigmoid"):
            own: Settings = {"model": {"growth": growth}}
            yield run(BRANCH, 6, seed, chosen(BRANCH, 6), updates, WITH_LAYERS, ask.settings, own, tags=["ramp", *tags])


def deepest(ask: Recipe) -> Iterator[Experiment]:
    """Yield 100L-100L with the recipe of figures (160 updates): two rates, and T = 1, 6 and 100 updates (4 % and 62 %
    of the run). The runs with T = 1 show if DeepNorm's initialisation needs a ramp at all."""
    for seed in ask.seeds or SEEDS:
        for rate in DEEPEST_RATES:
            for T in DEEPEST_RAMPS:
                own = {
                    "model": {"arch": BRANCH, "encoder_layers": DEEPEST, "decoder_layers": DEEPEST, "T": T},
                    "data": {"seed": seed},
                    "train": {"seed": seed, "lr": rate},
                }
                config = figure_config(probing(), ask.settings, own)
                yield Experiment(name_of(config, f"lr{rate:g}", f"T{T}"), config)


def fifty(ask: Recipe) -> Iterator[Experiment]:
    """Yield 50L-50L at the rates of 18 layers a side, half as long as the comparison."""
    for seed in ask.seeds or SEEDS:
        for arm in ARMS:
            yield run(arm, 50, seed, chosen(arm, 50), RAMP_UPDATES, probing(), ask.settings)
