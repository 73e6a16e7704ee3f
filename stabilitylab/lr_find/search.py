"""The engine of a search for a learning rate by trials, and the search of two rungs that sweeps use.

A trial is a run with the final schedule that is stopped early and may be continued. Losses early in a schedule can
mislead, and so can the losses of another, shorter schedule: at 6 layers a side the ranking of DeepNorm's rates was
right at 1,440 of 6,000 updates, that of BranchNorm's only at 2,400.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from ..errors import UsageError

STEP = 2.0  # factor between neighbouring rates of a grid that is extended
RIDGE = 0.05  # nats: two minima are two valleys if some rate between them is worse than both by more than this
HORIZON = 1500  # updates of a plan that names none
PLANNED = -1  # the warm-up of a trial that has the planned one
MOST_STEPS = 4  # how often an end of the grid is moved by a factor of 2 at most


@dataclass(frozen=True, order=True)
class RateTrial:
    """A run of ``updates`` updates of the schedule at learning rate ``rate``; a longer trial continues it.

    ``warmup``: updates of another warm-up than the planned one, or ``PLANNED``.
    """

    rate: float
    seed: int
    updates: int
    warmup: int = PLANNED


@dataclass(frozen=True)
class RateResult:
    """The end of a trial: its loss [nats/token] (inf or NaN for a run that failed), and whether the rate may be chosen.

    ``eligible``: False if the loss does not show the state of the model, such as an encoder-decoder that ignores its
    source. ``source_worth``: the measurement behind ``eligible`` [nats/token], if there is one. ``losses``: the parts
    whose mean is the loss, in one order for all trials of a seed. ``start``: the loss before the first update.
    ``failed``: how the run failed, "" if it did not.
    """

    loss: float
    eligible: bool = True
    source_worth: float | None = None
    losses: tuple[float, ...] = ()
    start: float = math.nan
    failed: str = ""


class RateTrials(Protocol):
    """Runs the trials of a search. A trial that was run before is not run again, and a longer one continues the shorter
    one."""

    def run(self, trials: Sequence[RateTrial]) -> Mapping[RateTrial, RateResult]: ...


@dataclass(frozen=True)
class Rungs:
    """The rules of a search.

    ``rates``: the first grid. Every rate is tried with every one of ``seeds`` for ``first`` updates of a schedule of
    ``last``; the best rates go on to ``last``. ``confirming``: further seeds that run ``first`` updates at the chosen
    rate.
    """

    rates: Sequence[float]
    seeds: Sequence[int]
    first: int
    last: int
    confirming: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(set(self.rates)) < 3:
            few = len(set(self.rates))
            raise UsageError(f"{few} rate{'s' * (few != 1)} cannot be searched: give three or more, as lr=A,B,C.")
        if not self.seeds or set(self.seeds) & set(self.confirming):
            raise UsageError("give seeds for the search, and other seeds that confirm the rate.")
        if not 1 <= self.first <= self.last:
            raise UsageError(
                f"the first rung has {self.first} updates, and the last {self.last}: give the last rung more updates."
            )


@dataclass(frozen=True)
class Choice:
    """The chosen rate and the evidence.

    ``rate``: None if no rate is eligible. ``lowest``: the rate of the lowest loss after the last rung, eligible or not;
    it can be run if ``rate`` is None. ``losses``: rate -> mean loss over the seeds after the last rung. ``notes``:
    sentences about doubts: edges of the grid, valleys, rejected rates.
    """

    rate: float | None
    lowest: float
    losses: Mapping[float, float]
    notes: tuple[str, ...] = ()
    results: Mapping[RateTrial, RateResult] = field(default_factory=dict)


class Search:
    """The engine: a grid of rates, and the results of the trials so far; no trial runs twice.

    ``grid``: the rates in order. ``seeds``: every rate runs with each of them. ``notes``: sentences about doubts.
    """

    def __init__(self, trainer: RateTrials, grid: Sequence[float], seeds: Sequence[int]) -> None:
        self.trainer, self.seeds = trainer, tuple(seeds)
        self.grid = sorted(set(grid))
        self.results: dict[RateTrial, RateResult] = {}
        self.notes: list[str] = []

    def losses(self, rates: Sequence[float], updates: int, seeds: Sequence[int] = ()) -> dict[float, float]:
        """Run the trials of ``rates`` and return their mean losses over the seeds; inf if a seed failed."""
        asked = {rate: [RateTrial(rate, seed, updates) for seed in seeds or self.seeds] for rate in rates}
        self.run([trial for trials in asked.values() for trial in trials])
        return {rate: self.mean(trials) for rate, trials in asked.items()}

    def run(self, trials: Sequence[RateTrial]) -> None:
        """Run the trials that have no result yet."""
        if new := [trial for trial in trials if trial not in self.results]:
            self.results |= self.trainer.run(new)

    def mean(self, trials: Sequence[RateTrial]) -> float:
        """Return the mean loss of trials with results; inf if one of them failed."""
        losses = [self.results[trial].loss for trial in trials]
        return sum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf

    def add(self, rates: Sequence[float]) -> None:
        """Add rates to the grid."""
        self.grid = sorted({*self.grid, *rates})

    def between_valleys(self, losses: Mapping[float, float], updates: int) -> dict[float, float]:
        """Return the losses with those of the geometric means of neighbouring rates between valleys; unchanged if there
        is one valley."""
        if len(found := valleys(losses)) < 2:
            return dict(losses)
        between = [rate for rate in losses if found[0] <= rate <= found[-1]]
        means = [middle(low, high) for low, high in pairwise(sorted(between))]
        named = ", ".join(f"{rate:g}" for rate in found)
        self.notes.append(f"The first rung has {len(found)} valleys ({named}), so rates between them were tried.")
        more = self.losses(means, updates)
        self.add(means)
        return {**losses, **more}

    def below(self, rate: float) -> float | None:
        """Return the next lower rate of the grid; None if there is none."""
        return max((other for other in self.grid if other < rate), default=None)

    def eligible(self, losses: Mapping[float, float], updates: int) -> dict[float, float]:
        """Return the rates at which every seed is eligible after so many updates."""

        def fits(rate: float) -> bool:
            return all(self.results[RateTrial(rate, seed, updates)].eligible for seed in self.seeds)

        return {rate: loss for rate, loss in losses.items() if math.isfinite(loss) and fits(rate)}

    def fit_at_last(self, losses: dict[float, float], updates: int, most: int | None = None) -> dict[float, float]:
        """Return the eligible rates after the last rung. While there is none, the next lower rate of the grid runs, and
        is added to ``losses``; ``most`` such rates, None: down to the least."""
        tried = 0
        while not (fit := self.eligible(losses, updates)) and (lower := self.below(min(losses))) is not None:
            if tried == most:
                break
            tried += 1
            self.notes.append(f"No rate from {min(losses):g} on is eligible, so {lower:g} goes on to the last rung.")
            losses |= self.losses([lower], updates)
        return fit

    def confirmed(self, rate: float, seeds: Sequence[int], updates: int, ends: Sequence[int]) -> float | None:
        """Run ``updates`` updates with further ``seeds``; return ``rate``, or the next lower rate at which every seed
        is eligible, None if there is none. ``ends``: the rungs after which the first seeds must be eligible too."""
        while True:
            asked = [RateTrial(rate, seed, updates) for seed in seeds]
            self.run(asked)
            failing = [trial.seed for trial in asked if not self.results[trial].eligible]
            known = [RateTrial(rate, seed, end) for seed in self.seeds for end in ends]
            own = {trial.seed: trial for trial in known if trial in self.results}
            failing += [seed for seed, trial in own.items() if not self.results[trial].eligible]
            if not failing:
                return rate
            named = ", ".join(map(str, sorted(failing)))
            self.notes.append(f"At {rate:g} seed{'s' * (len(failing) > 1)} {named} {_are(failing)} not eligible.")
            if (lower := self.below(rate)) is None:
                return None
            if not any(RateTrial(lower, seed, end) in self.results for seed in self.seeds for end in ends):
                self.losses([lower], updates)
            rate = lower


def choose(rungs: Rungs, trainer: RateTrials) -> Choice:
    """Search the rate of the lowest final loss among those at which every seed is eligible.

    1. All rates run ``first`` updates with all seeds. While the lowest mean loss stands at an edge of the grid, it is
       extended by a factor of 2; between two valleys the geometric means of neighbouring rates are added.
    2. The two best rates, the geometric mean of the best and its better neighbour, and the best rate of every other
       valley go on to ``last``. If none is eligible there, the next lower rate of the grid goes on, down to the least.
    3. The eligible rate of the lowest mean loss runs ``first`` updates with the confirming seeds. If one of them is not
       eligible, the next lower one of all rates that were tried is taken and confirmed.

    Raises UsageError if the rules cannot be followed, and whatever ``trainer`` raises.
    """
    search = Search(trainer, rungs.rates, rungs.seeds)
    first = _first_rung(search, rungs)
    last = search.losses(_carried(search, first), rungs.last)
    fit = search.fit_at_last(last, rungs.last)
    lowest = least(last)
    search.add([*last])  # a rate between two of the grid may be the next lower one
    rate = search.confirmed(least(fit), rungs.confirming, rungs.first, (rungs.first, rungs.last)) if fit else None
    if rate is None:
        search.notes.append("No rate is eligible with every seed.")
    if (named := rate or lowest) in (search.grid[0], search.grid[-1]):
        search.notes.append(f"The rate {named:g} stands at the edge of the grid: a better one may lie beyond.")
    elif named == lowest != least(first) and named in (min(last), max(last)):
        side = "lowest" if named == min(last) else "highest"
        search.notes.append(
            f"The rate {named:g} is the {side} of the last rung but not the best of the first: a better one may lie "
            "beyond."
        )
    return Choice(rate, lowest, dict(sorted(last.items())), tuple(search.notes), dict(search.results))


def _first_rung(search: Search, rungs: Rungs) -> dict[float, float]:
    """Return mean losses by rate; the grid is extended until its best rate lies inside, and refined between valleys."""
    losses = search.losses(search.grid, rungs.first)
    for _ in range(2 * MOST_STEPS):
        best = least(losses)
        beyond = best / STEP if best == search.grid[0] else best * STEP if best == search.grid[-1] else None
        if beyond is None:
            break
        if not min(rungs.rates) / STEP**MOST_STEPS <= beyond <= max(rungs.rates) * STEP**MOST_STEPS:
            search.notes.append(
                f"The grid was not extended beyond {best:g}, a factor of {STEP**MOST_STEPS:g} from its first edge."
            )
            break
        search.notes.append(f"The best rate of the first rung, {best:g}, stood at the edge, so {beyond:g} was tried.")
        search.add([beyond])
        losses |= search.losses([beyond], rungs.first)
    return search.between_valleys(losses, rungs.first)


def _carried(search: Search, losses: Mapping[float, float]) -> list[float]:
    """Return the rates that go on to the last rung."""
    ranked = sorted(losses, key=lambda rate: order(losses[rate]))
    best = ranked[0]
    near = [search.grid[at] for at in _beside(search.grid.index(best), len(search.grid))]
    neighbour = min(near, key=lambda rate: order(losses[rate]))
    others = [rate for rate in valleys(losses) if rate not in ranked[:2]]
    return list(dict.fromkeys([*ranked[:2], middle(best, neighbour), *others]))


def valleys(losses: Mapping[float, float]) -> list[float]:
    """Return the rates at the minima of a curve of losses over rates that are separated by ridges higher than
    ``RIDGE``.

    Two minima are two valleys if a loss between them exceeds both by more than .05 nats. A loss that is not finite (inf
    or NaN) is no minimum, and a ridge. A curve without a finite loss has no valley.
    """
    rates = sorted(losses)
    found: list[float] = []
    for rate in rates:
        if not math.isfinite(losses[rate]):
            continue
        if not found:
            found.append(rate)
            continue
        inside = [losses[other] for other in rates if found[-1] < other < rate]
        between = [loss if math.isfinite(loss) else math.inf for loss in inside]
        ridge = max(between, default=-math.inf)
        if ridge > max(losses[found[-1]], losses[rate]) + RIDGE:
            found.append(rate)
        elif losses[rate] < losses[found[-1]]:
            found[-1] = rate
    return found


def middle(low: float, high: float) -> float:
    """Return the geometric mean of two rates, to three digits, as rates are written."""
    return float(f"{math.sqrt(low * high):.3g}")


def least(losses: Mapping[float, float]) -> float:
    """Return the rate of the lowest loss; of two rates with equal losses, the lower one."""
    return min(losses, key=lambda rate: (*order(losses[rate]), rate))


def order(loss: float) -> tuple[bool, float]:
    """Return the sort key of a loss, in which losses that are not finite come last."""
    return not math.isfinite(loss), loss if math.isfinite(loss) else 0.0


def _beside(at: int, count: int) -> list[int]:
    """Return the positions beside ``at`` in a list of ``count``."""
    return [place for place in (at - 1, at + 1) if 0 <= place < count]


def _are(items: Sequence[object]) -> str:
    return "are" if len(items) > 1 else "is"
