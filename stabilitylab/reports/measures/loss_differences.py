"""Differences of losses, seed by seed, of runs that differ in the architecture or in one setting of BranchNorm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .. import style
from ..base import MissingRuns, Series, Spread
from ..claims import Effect, described, together
from ..collection import LAYERS, Record, Runs, pairs
from ..statistics import Region, t_interval
from .comparison import ENOUGH, comparable, failed, last_nll, with_the_protocols_ramp
from .quality import even, share_of

EQUIVALENT = 0.05  # nats: the margin of "insensitive to"
Gaps = dict[int, dict[int, float]]  # depth, or length of the ramp -> seed -> loss minus that of another run


def gaps_of(group: Runs, first: str, second: str, loss: Callable[[Record], float] = last_nll) -> Gaps:
    """Subtract the loss of ``second`` from that of ``first`` at each depth, by seed. Pairs with a loss that was not
    measured are left out. If one run diverged the difference is infinite; if both did it is NaN. Such a depth is then
    undecided."""
    gaps: Gaps = {}
    for depth in group.depths:
        one, other = (group.where(depth=depth, label=label) for label in (first, second))
        losses = {seed: (loss(a), loss(b)) for seed, a, b in pairs(one, other)}
        if values := {seed: a - b for seed, (a, b) in losses.items() if not math.isnan(a + b)}:
            gaps[depth] = values
    return gaps


def gap_line(gaps: Gaps, name: str, **look: Any) -> Series:
    """Return a line of gaps: at each depth, or length of the ramp, the mean over seeds with their range."""
    spread = Spread()
    for place, by_seed in gaps.items():
        for value in by_seed.values():
            spread.add([place], [value])
    return spread.series(name, **look)


def behind(group: Runs, depth: int, seeds: Iterable[int], *labels: str) -> Runs:
    """Picks the runs of ``labels`` at this depth and these seeds: those from which a gap was taken."""
    some = {*seeds}
    return group.where(lambda run: run.seed in some, depth=depth, label=labels)


def weight(group: Runs, gaps: Gaps) -> tuple[float, ...]:
    """Rank a group's gaps: enough seeds, then a long training, then much data, then many depths."""
    seeds = min(ENOUGH, max(map(len, gaps.values()), default=0))
    return seeds, float(group[0].updates), share_of(group[0]), len(gaps)


def between_architectures(
    runs: Runs, first: str, second: str, beside: str, name: str, loss: Callable[[Record], float] = last_nll
) -> list[Effect]:
    """Subtract the loss of ``second`` from that of ``first`` at equal steps with the protocol's ramp. The comparable
    group has enough seeds and was trained longest, on the most data. The first effect is the mean over its depths; for
    description follow each depth, and there ``first`` minus ``beside`` and ``beside`` minus ``second``."""
    own = runs.where(even, kind="train", label=(first, second, beside))
    groups = comparable(with_the_protocols_ramp(own), *LAYERS)
    found = [(group, gaps) for group in groups if (gaps := gaps_of(group, first, second, loss))]
    if not found:
        raise MissingRuns(f"needs {first} and {second} with the same seeds and settings, and held-out losses")
    group, _ = max(found, key=lambda one: weight(*one))
    each = {
        both: [
            Effect(f"{_titles(*both)} at {depth}L", values, of=behind(group, depth, values, *both))
            for depth, values in gaps_of(group, *both, loss).items()
        ]
        for both in ((first, second), (first, beside), (beside, second))
    }
    mean = together(f"{name}, mean over depths", each[first, second], np.mean, Region(high=-0.01), Region(low=0.01))
    return [mean, *itertools.chain.from_iterable(each.values())]


def _titles(one: str, other: str) -> str:
    return f"{style.title(one)} - {style.title(other)}"


def ramped(runs: Runs) -> Runs:
    """Pick runs of BranchNorm with the paper's initialisation and alpha, and any schedule."""
    own: dict[str, Any] = dict.fromkeys(f"model__{key}" for key in ("alpha", "decoder_arch", "qk_gain", "v_gain"))
    own |= {"model__init": "arch", "model__t0": 1}
    return runs.where(lambda run: style.family(run.label) == "branchnorm", kind="train", **own)


def of_values(runs: Runs, setting: str, count: int) -> dict[Any, dict[int, Record]]:
    """Map value of ``setting`` to seed to run of BranchNorm, with all other settings equal. The group chosen has
    ``count`` values or more. It is the one with the most seeds that have all of its values, then with the longest
    training, then with the most values."""
    best: dict[Any, dict[int, Record]] = {}
    rank = (0, 0, 0)
    for group in ramped(runs).where(lambda run: run.label != "branchnorm T=1").groups(setting):
        others = [key for key in ("model.T", "model.growth") if key != setting]
        for fixed in {tuple(run.settings[key] for key in others): None for run in group}:
            values: dict[Any, dict[int, Record]] = {}
            for run in group:
                if tuple(run.settings[key] for key in others) == fixed:
                    values.setdefault(run.settings[setting], {})[run.seed] = run
            often = sorted(values, key=lambda value: -len(values[value]))
            for most in range(count, len(often) + 1):  # a value that few seeds have must not take the others' seeds
                some = {value: values[value] for value in often[:most]}
                own = (len(shared_seeds(some.values())), group[0].updates, most)
                if own[0] and own > rank:
                    best, rank = some, own
    if not best:
        raise MissingRuns(
            f"needs branchnorm runs that differ in {setting} alone, at {count} values such as those of the paper "
            "scaled to the length of the runs, with the same seeds"
        )
    return best


def equivalence(found: dict[Any, dict[int, Record]], one: Any, other: Any, name: str) -> Effect:
    """Subtract the final nll at the value ``other`` from that at ``one``, by seeds that all values have. A run that
    diverged or is stuck makes its comparisons undecided, not equal."""
    seeds = shared_seeds(found.values())
    gap = {seed: _ended(found[one][seed]) - _ended(found[other][seed]) for seed in seeds}
    outside = Region(low=EQUIVALENT) if sum(gap.values()) > 0 else Region(high=-EQUIVALENT)
    of = [found[value][seed] for value in (one, other) for seed in seeds]
    return Effect(name, gap, Region(-EQUIVALENT, EQUIVALENT), outside, of=of)


def every_two(found: dict[Any, dict[int, Record]], setting: str, first: tuple[Any, Any], where: str) -> list[Effect]:
    """Compare every two values: the pair ``first`` with its regions, the other pairs for description only."""
    two = sorted(itertools.combinations(sorted(found), 2), key=lambda both: set(both) != set(first))
    name = setting.partition(".")[2]
    effects = []
    for both in two:
        one, other = first if set(both) == set(first) else (both[1], both[0])
        effects.append(equivalence(found, one, other, f"{name} = {one} minus {other}{where}"))
    return [*effects[:1], *map(described, effects[1:])]


def _ended(run: Record) -> float:
    return math.inf if failed(run) else last_nll(run)


def measured(values: Iterable[float], form: str = "+.3f") -> str:
    """Writes a mean over seeds in words, with its interval where two seeds or more give one: ``+0.010 [-0.002,
    +0.022]``."""
    found = t_interval(values)
    between = f" [{found.low:{form}}, {found.high:{form}}]" if found.n > 1 else ""
    return f"{found.mean:{form}}{between}"


def shared_seeds(values: Iterable[dict[int, Any]]) -> list[int]:
    """List the seeds that all values have."""
    sets = [set(by_seed) for by_seed in values]
    return sorted(set.intersection(*sets)) if sets else []
