"""From measurements to an order, by the rule of docs/recommend.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from scipy import stats

from .columns import COLUMNS, RANKED, Column
from .measurement import Measurement


@dataclass(frozen=True)
class Ranked:
    """Where an architecture stands: ``score`` is its mean rank, ``numbers`` are medians over seeds."""

    place: int
    arch: str
    score: float
    broken: tuple[str, ...]  # the bounds that it broke with any seed, each with what was wrong
    numbers: dict[str, float]
    unbroken: bool  # whether its range test ended without a break with any seed, so that headroom is a lower bound
    seeds: int


def ranking(measurements: Iterable[Measurement]) -> list[Ranked]:
    """Best first: those that keep all bounds, by mean rank over seeds and ranked columns; then the others likewise.

    Architectures are compared at the seeds that all of them have.
    """
    by_arch: dict[str, dict[int, Measurement]] = {}
    for one in measurements:
        by_arch.setdefault(one.arch, {})[one.seed] = one
    seeds = sorted(set.intersection(*(set(own) for own in by_arch.values()))) if by_arch else []
    if not seeds:
        return []
    scores = {arch: [0.0] * 0 for arch in by_arch}
    for seed in seeds:
        for column in RANKED:
            for arch, rank in ranks([own[seed] for own in by_arch.values()], column).items():
                scores[arch].append(rank)
    found = []
    for arch, own in by_arch.items():
        mine = [own[seed] for seed in seeds]
        broken = {name: f"{name}: {why}" for one in reversed(mine) for name, why in one.broken.items()}
        numbers = {column.name: _median([one.numbers.get(column.name, math.nan) for one in mine]) for column in COLUMNS}
        unbroken = any(not one.evidence.get("headroom_broke", True) for one in mine)
        found.append(Ranked(0, arch, fmean(scores[arch]), (*broken.values(),), numbers, unbroken, len(mine)))
    found.sort(key=lambda place: (bool(place.broken), place.score, -place.numbers["progress"], place.arch))
    return [Ranked(**{**vars(place), "place": number}) for number, place in enumerate(found, start=1)]


def ranks(measurements: Sequence[Measurement], column: Column) -> dict[str, float]:
    """Architecture -> its rank in one column, 1 the best; ties share their mean."""
    values = [column.badness(one.numbers) for one in measurements]
    return dict(zip((one.arch for one in measurements), stats.rankdata(values).tolist(), strict=True))


def _median(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else median(values)
