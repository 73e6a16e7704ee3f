"""Losses of runs that differ in one thing, seed by seed: the architecture, or a setting of BranchNorm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from .. import style
from ..base import MissingRuns
from ..claims import Effect
from ..collection import LAYERS, Record, Runs, pairs
from ..layerwise import ENOUGH, comparable, failed, last_nll
from ..statistics import Region, signed_rank, t_interval
from .branchnorm_5 import even, share_of

EQUIVALENT = 0.05  # nats: the margin of "insensitive to"
Gaps = dict[int, dict[int, float]]  # depth -> seed -> loss of one label minus that of another


def gaps_of(group: Runs, first: str, second: str, loss: Callable[[Record], float] = last_nll) -> Gaps:
    """``first`` minus ``second`` at each depth, by seed. Pairs of which one was not measured are left out; where one
    diverged the difference is infinite, and not a number where both did: that depth is then undecided."""
    gaps: Gaps = {}
    for depth in group.depths:
        one, other = (group.where(lambda run, d=depth: run.depth == d, label=label) for label in (first, second))
        losses = {seed: (loss(a), loss(b)) for seed, a, b in pairs(one, other)}
        if values := {seed: a - b for seed, (a, b) in losses.items() if not math.isnan(a + b)}:
            gaps[depth] = values
    return gaps


def weight(group: Runs, gaps: Gaps) -> tuple[float, ...]:
    """What a group's gaps count for: enough seeds, then a long training, on the most data, at the most depths."""
    seeds = min(ENOUGH, max(map(len, gaps.values()), default=0))
    return seeds, float(group[0].updates), share_of(group[0]), len(gaps)


def gaps_beside(
    runs: Runs, first: str, second: str, beside: str, loss: Callable[[Record], float] = last_nll
) -> tuple[Gaps, Gaps]:
    """``first`` minus ``second`` at equal steps, of the comparable group that was trained longest, on the most data,
    with enough seeds; and ``beside`` minus ``second`` in the same group."""
    groups = comparable(runs.where(even, kind="train", label=(first, second, beside)), *LAYERS)
    found = [(group, gaps) for group in groups if (gaps := gaps_of(group, first, second, loss))]
    if not found:
        return {}, {}
    group, gaps = max(found, key=lambda one: weight(*one))
    return gaps, gaps_of(group, beside, second, loss)


def ramped(runs: Runs) -> Runs:
    """BranchNorm as the paper has it, whatever its schedule: no control of its initialisation or of alpha itself."""
    own: dict[str, Any] = dict.fromkeys(f"model__{key}" for key in ("alpha", "decoder_arch", "qk_gain", "v_gain"))
    own |= {"model__init": "arch", "model__t0": 1}
    return runs.where(lambda run: style.family(run.label) == "branchnorm", kind="train", **own)


def between_values(runs: Runs, setting: str, count: int, where: str = "") -> list[Effect]:
    """Each two values of ``setting`` against each other: BranchNorm's final nll by seed, in the group with most seeds
    at all of ``count`` values or more, then of the longest training, then at most values. A run that diverged or is
    stuck makes its comparisons undecided, not equal."""
    best: dict[Any, dict[int, float]] = {}
    rank = (0, 0, 0)
    for group in ramped(runs).where(lambda run: run.label != "branchnorm T=1").groups(setting):
        others = ("model.T", "model.growth")
        split = {tuple(run.settings[key] for key in others if key != setting): None for run in group}
        for fixed in split:
            values: dict[Any, dict[int, float]] = {}
            for run in group:
                if tuple(run.settings[key] for key in others if key != setting) == fixed:
                    values.setdefault(run.settings[setting], {})[run.seed] = math.inf if failed(run) else last_nll(run)
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
    seeds = shared_seeds(best.values())
    found = []
    for one, other in itertools.combinations(sorted(best), 2):
        gap = {seed: best[other][seed] - best[one][seed] for seed in seeds}
        above = sum(gap.values()) > 0
        outside = Region(low=EQUIVALENT) if above else Region(high=-EQUIVALENT)
        name = f"{setting.partition('.')[2]} = {other} minus {one}{where}"
        found.append(Effect(name, gap, Region(-EQUIVALENT, EQUIVALENT), outside, p=signed_rank([*gap.values()])))
    return found


def measured(values: Iterable[float], form: str = "+.3f") -> str:
    """A mean over seeds in words, with its interval where two seeds or more give one: ``+0.010 [-0.002, +0.022]``."""
    found = t_interval(values)
    between = f" [{found.low:{form}}, {found.high:{form}}]" if found.n > 1 else ""
    return f"{found.mean:{form}}{between}"


def shared_seeds(values: Iterable[dict[int, float]]) -> list[int]:
    """Seeds that all have."""
    sets = [set(by_seed) for by_seed in values]
    return sorted(set.intersection(*sets)) if sets else []
