"""Made-up final losses by depth and seed, and what a claim says of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from in_memory import remembered

from stabilitylab.reports.claims import CLAIMS, Finding, judge
from stabilitylab.reports.collection import Record, Runs

SEEDS = (3, 4, 5, 6)
SPREAD = dict(zip(SEEDS, (-0.003, -0.001, 0.001, 0.003), strict=True))  # what the seed adds to a difference
Loss = Callable[[int, int], float]  # of depth and seed


def models(
    arch: str, loss: Loss, *, depths: Sequence[int] = (6,), seeds: Iterable[int] = SEEDS, **more: Any
) -> list[Record]:
    return [
        remembered(f"{arch}-{n}-{s}-{more}", arch=arch, layers=n, seed=s, nll=loss(n, s), **more)
        for n in depths
        for s in seeds
    ]


def verdict(id: str, *records: Sequence[Record]) -> Finding:
    return judge(CLAIMS[id], Runs(itertools.chain(*records)))


def flat(n: int, s: int) -> float:
    return 5.0


def by_depth(slope: float, at_zero: float = 0.0) -> Loss:
    return lambda n, s: 5.0 + at_zero + slope * n + SPREAD[s]
