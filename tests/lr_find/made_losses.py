"""Trials whose losses are a formula, for tests of the rules of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stabilitylab.lr_find.halving import SearchStopped
from stabilitylab.lr_find.search import RateResult, RateTrial

START = 6.0
PARTS = 16


def bowl(best: float, floor: float = 2.0, depth: float = 0.1) -> Callable[[RateTrial], float]:
    """Return losses that are lowest at ``best`` and fall with the updates; never above the start."""

    def loss(trial: RateTrial) -> float:
        bottom = START - (START - floor) * (1 - math.exp(-trial.updates / 400))
        return min(START - 0.01, bottom + depth * math.log2(trial.rate / best) ** 2)

    return loss


@dataclass
class MadeTrials:
    """Runs trials by ``loss``; at rates from ``fails_at`` on they fail. ``noise``: of the parts of a loss, which all
    rates of a seed share to ``shared``. ``updates``: the budget."""

    loss: Callable[[RateTrial], float]
    fails_at: float = math.inf
    noise: float = 0.0
    shared: float = 0.0
    start: float = START
    updates: float = math.inf
    unread: Callable[[RateTrial], bool] = lambda trial: False
    fails: Callable[[RateTrial], bool] = lambda trial: False
    asked: list[RateTrial] = field(default_factory=list)
    spent: int = 0

    def ahead(self, trial: RateTrial) -> int:
        same = [
            one.updates
            for one in self.asked
            if (one.rate, one.seed, one.warmup) == (trial.rate, trial.seed, trial.warmup)
        ]
        return max(0, trial.updates - max(same, default=0))

    def affords(self, trials: Sequence[RateTrial]) -> bool:
        return self.spent + sum(map(self.ahead, trials)) <= self.updates

    def run(self, trials: Sequence[RateTrial]) -> Mapping[RateTrial, RateResult]:
        if not self.affords(trials):
            raise SearchStopped("budget", "The budget ended the search.")
        found = {}
        for trial in trials:
            self.spent += self.ahead(trial)
            self.asked.append(trial)
            found[trial] = self.result(trial)
        return found

    def result(self, trial: RateTrial) -> RateResult:
        if trial.rate >= self.fails_at or self.fails(trial):
            return RateResult(math.inf, eligible=False, start=self.start, failed="the loss is nan at update 3")
        common = np.random.default_rng([trial.seed, trial.updates]).normal(size=PARTS)
        own = np.random.default_rng([trial.seed, trial.updates, int(trial.rate * 1e9)]).normal(size=PARTS)
        parts = self.shared * common + self.noise * own
        parts = self.loss(trial) + parts - (parts.mean() if not self.noise else self.shared * common.mean())
        return RateResult(
            float(parts.mean()), not self.unread(trial), losses=tuple(map(float, parts)), start=self.start
        )

    def rates(self, updates: int, seed: int = 0) -> list[float]:
        return sorted({one.rate for one in self.asked if (one.updates, one.seed, one.warmup) == (updates, seed, -1)})
