"""The search of ``lr-find``: a grid from below any use to failure, rungs up to the horizon, other seeds, warm-ups.

Before ``TRUSTED`` of the horizon losses rank rates wrongly, so that only failed trials are dropped there. From there on
a rate is dropped if it loses to the best one beyond a paired interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import UsageError
from .pairs import excess
from .search import PLANNED, STEP, RateResult, RateTrial, RateTrials, Search, least

FIRST, GROWTH = 150, 3  # updates of the first rung, and the factor between rungs
TRUSTED = 0.4  # share of the horizon from which on losses may drop a rate
NEAR = 1.5  # a rung within this factor of the next one is left out
SPAN = 8.0  # rates that go on span this factor at least, below the best of the first rung too
LEAST_RATES = 3
USELESS = 0.5  # a loss that lies above the best by more than this share of the fall is of no use
FURTHEST = 2.0**14  # the largest factor between the first rate and an end of the grid
DELTA, DELTA_SHARE = 0.05, 0.1  # of the loss; of the fall from the start to the best loss, where that is less
LOWER = 2  # the most lower rates that run to the horizon if no rate is eligible there
SAME = 1e-7  # two losses are the same if they differ by no more than this share
SEEDS = (0, 1, 2)
WARMUPS = (0, 10, 40, 160)


class BudgetedTrials(RateTrials, Protocol):
    """Runs the trials of a search within a budget. ``affords``: True if the budget suffices for these trials."""

    def affords(self, trials: Sequence[RateTrial]) -> bool: ...


class SearchStopped(Exception):
    """The end of a search before its last trial: a budget or a request. ``why``: "budget" or "request"."""

    def __init__(self, why: str, sentence: str) -> None:
        super().__init__(sentence)
        self.why = why


@dataclass(frozen=True)
class RatePlan:
    """The plan of a search.

    - ``first``: the rate in the middle of the first grid.
    - ``horizon``: the updates of the planned run.
    - ``seeds``: the first seed searches; the others repeat its answers.
    - ``warmup``: the updates of the planned warm-up; None if the schedule has a warm-up of its own, which the search
      cannot change.
    - ``delta``: the loss of a safe rate may exceed the lowest loss by this much. None: ``DELTA``, or ``DELTA_SHARE`` of
      the fall of the loss if that is less.
    - ``warmups``: the warm-ups to try.

    Raises UsageError for values that make no plan.
    """

    first: float
    horizon: int
    seeds: Sequence[int] = SEEDS
    warmup: int | None = 0
    delta: float | None = None
    warmups: Sequence[int] = WARMUPS

    def __post_init__(self) -> None:
        if not 0 < self.first < math.inf:
            raise UsageError(f"the first rate is {self.first:g}: give an optimizer whose learning rate is above 0.")
        if self.horizon < 20:
            raise UsageError(f"horizon = {self.horizon}: give the updates of the planned run, 20 or more.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError("seeds must be different numbers, the first of which searches.")
        if self.delta is not None and not 0 < self.delta < math.inf:
            raise UsageError(f"delta = {self.delta:g}: give a difference of losses above 0.")
        if self.warmup is not None and not 0 <= self.warmup < self.horizon:
            raise UsageError(
                f"warmup = {self.warmup} does not go with a horizon of {self.horizon}: give 0 or more updates that are "
                "fewer (warmup=, --warmup), or a longer horizon."
            )

    @property
    def rungs(self) -> tuple[int, ...]:
        """The updates after which trials are compared: 150, 450, 1350, ..., then .4 of the horizon and the horizon."""
        trusted = self.trusted
        early = []
        updates = FIRST
        while updates * NEAR <= trusted:
            early.append(updates)
            updates *= GROWTH
        late = [trusted] if trusted * NEAR <= self.horizon else []
        return (*early, *late, self.horizon)

    @property
    def trusted(self) -> int:
        """The number of updates from which losses may drop a rate."""
        return min(self.horizon, max(min(FIRST, self.horizon), math.ceil(TRUSTED * self.horizon)))

    @property
    def tried_warmups(self) -> tuple[int, ...]:
        """The warm-ups below the planned one that are tried, in ascending order."""
        return () if not self.warmup else tuple(sorted({own for own in self.warmups if 0 <= own < self.warmup}))

    def tolerance(self, start: float, best: float) -> float:
        """Return delta for a loss that falls from ``start`` to ``best``. If the loss does not fall, return a share of
        the loss itself."""
        if self.delta is not None:
            return self.delta
        fall = start - best
        if not math.isfinite(fall):
            return DELTA
        return min(DELTA, DELTA_SHARE * (fall if fall > 0 else abs(start)))


@dataclass
class SearchRecord:
    """The trials of a search so far.

    - ``updates``: the last rung that all its rates reached (in the first rung: the rates of the first grid); 0 before
      the first rung has ended.
    - ``rungs``: rung -> the rates that reached it.
    - ``best``, ``safe``: rates that were repeated with other seeds.
    - ``warmups``: the warm-ups that were tried at the safe rate.
    - ``stopped``: the reason why the search ended early, "" if it did not; ``why``: the kind of this reason.
    """

    plan: RatePlan
    results: dict[RateTrial, RateResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rungs: dict[int, list[float]] = field(default_factory=dict)
    updates: int = 0
    best: float | None = None
    safe: float | None = None
    warmups: list[int] = field(default_factory=list)
    stopped: str = ""
    why: str = ""

    def result(self, rate: float, updates: int, seed: int | None = None) -> RateResult:
        """Return the result of a trial, by default of the seed that searches."""
        return self.results[RateTrial(rate, self.plan.seeds[0] if seed is None else seed, updates)]

    def losses(self, updates: int) -> dict[float, float]:
        """Return the losses after a rung by rate, of the seed that searches; inf for a failed trial."""
        found = {rate: self.result(rate, updates) for rate in sorted(self.rungs.get(updates, ()))}
        return {
            rate: math.inf if one.failed or not math.isfinite(one.loss) else one.loss for rate, one in found.items()
        }

    @property
    def start(self) -> float:
        """The loss before training; NaN if no trial has ended."""
        return next((one.start for one in self.results.values() if math.isfinite(one.start)), math.nan)

    @property
    def is_constant(self) -> bool:
        """True if trials have ended without a failure, and none of them has changed the loss."""
        found = [one for one in self.results.values() if not one.failed]
        return bool(found) and all(abs(one.loss - one.start) <= SAME * max(1.0, abs(one.start)) for one in found)

    def delta(self, updates: int) -> float:
        """Return the tolerance by the losses after a rung."""
        losses = [loss for loss in self.losses(updates).values() if math.isfinite(loss)]
        return self.plan.tolerance(self.start, min(losses, default=math.nan))


def halve(plan: RatePlan, trainer: BudgetedTrials) -> SearchRecord:
    """Search the best and the largest safe rate of ``plan``, and the least warm-up.

    1. The grid after the first rung reaches from a factor of 8 below the best rate to the first rate that fails or is
       of no use.
    2. Every rung: failed rates are dropped. From ``TRUSTED`` of the horizon on, rates that lose to the best by more
       than delta beyond the paired interval are dropped, but for the neighbours of the best.
    3. The best rate, and the largest rate within delta of it, are repeated at the horizon with the other seeds; a rate
       at which one of them fails gives way to the next lower one.
    4. Shorter warm-ups run at the largest safe rate up to ``TRUSTED`` of the horizon.

    A search that is stopped (SearchStopped of ``trainer``) returns the stages that ended.
    """
    search = _Halving(plan, trainer)
    try:
        search.carry_out()
    except SearchStopped as stopped:
        search.record.stopped, search.record.why = str(stopped), stopped.why
    return search.record


class _Halving:
    def __init__(self, plan: RatePlan, trainer: BudgetedTrials) -> None:
        self.plan, self.trainer = plan, trainer
        self.engine = Search(trainer, [plan.first * STEP**power for power in (-2, -1, 0, 1, 2)], plan.seeds[:1])
        self.record = SearchRecord(plan, self.engine.results, self.engine.notes)  # both grow as the engine works

    def carry_out(self) -> None:
        plan = self.plan
        losses: dict[float, float] = {}
        for number, updates in enumerate(plan.rungs):
            if not number:
                losses = self.first_rung(updates)
            else:
                losses = self.engine.losses(self.affordable(losses, plan.rungs[number - 1], updates), updates)
                losses = self.inside(losses, updates)
            self.close(updates, losses)
            if not any(map(math.isfinite, losses.values())) or self.record.is_constant:
                return
        self.repeat(losses)
        self.try_warmups()

    def close(self, updates: int, losses: Mapping[float, float]) -> None:
        """Record that all rates of a rung have reached it."""
        self.record.rungs[updates], self.record.updates = sorted(losses), updates

    def first_rung(self, updates: int) -> dict[float, float]:
        """Return the losses of a grid that reaches from below any use to failure."""
        losses = self.engine.losses(self.by_distance(), updates)
        self.close(updates, losses)
        while (rate := self.lacking(losses)) is not None:
            self.engine.add([rate])
            losses |= self.engine.losses([rate], updates)
            self.close(updates, losses)
        return losses

    def by_distance(self) -> list[float]:
        """Return the grid, the first rate first, so that a budget that ends early has tried the likeliest."""
        return sorted(self.engine.grid, key=lambda rate: abs(math.log(rate / self.plan.first)))

    def lacking(self, losses: Mapping[float, float]) -> float | None:
        """Return the next rate of the grid after the first rung; None if it reaches far enough."""
        if self.record.is_constant:
            return None
        low, high = min(losses), max(losses)
        best = least(losses)
        if not math.isfinite(losses[best]):
            return self.within(low / STEP)
        if not self.is_useless(losses[high], losses[best]) and (rate := self.within(high * STEP)) is not None:
            return rate
        return self.within(low / STEP) if low * SPAN > best * 1.001 else None

    def within(self, rate: float) -> float | None:
        """Return ``rate``; None, and a note, if it is too far from the first one."""
        if self.plan.first / FURTHEST <= rate <= self.plan.first * FURTHEST:
            return rate
        note = f"The grid was not extended to {rate:.3g}, a factor of more than {FURTHEST:g} from {self.plan.first:g}."
        if note not in self.engine.notes:
            self.engine.notes.append(note)
        return None

    def is_useless(self, loss: float, best: float) -> bool:
        fall = self.record.start - best
        return not math.isfinite(loss) or (fall > 0 and loss - best > USELESS * fall)

    def going_on(self, losses: Mapping[float, float], updates: int) -> list[float]:
        """Return the rates that go on to the next rung after ``updates``."""
        alive = sorted(rate for rate, loss in losses.items() if math.isfinite(loss))
        if updates < self.plan.trusted:
            return self.spanning(alive)
        best = least(losses)
        result = self.record.result(best, updates)
        delta = self.plan.tolerance(self.record.start, losses[best])
        kept = {rate for rate in alive if excess(self.record.result(rate, updates), result).low <= delta}
        at = alive.index(best)
        return sorted(kept | set(alive[max(0, at - 1) : at + 2]))

    def affordable(self, losses: Mapping[float, float], before: int, updates: int) -> list[float]:
        """Return the rates that go on to ``updates``; the best and those that span a factor of 8 with it, if the budget
        does not suffice for all."""
        rates = self.going_on(losses, before)
        seed = self.plan.seeds[0]
        if self.trainer.affords([RateTrial(rate, seed, updates) for rate in rates]):
            return rates
        best = least({rate: losses.get(rate, math.inf) for rate in rates})
        few = [rate for rate in rates if best / (SPAN / 2) * 0.999 <= rate <= best * STEP * 1.001]
        few = [rate for rate in few if rate in (best, min(few), max(few))]
        if len(few) < len(rates) and self.trainer.affords([RateTrial(rate, seed, updates) for rate in few]):
            self.engine.notes.append(
                f"The budget suffices for {len(few)} of {len(rates)} rates beyond {before:,} updates: the best rate "
                "and rates near it."
            )
        return few

    def spanning(self, alive: list[float]) -> list[float]:
        """Return ``alive``, with lower rates if there are fewer than three or if they span less than a factor of 8."""
        rates = list(alive)
        while len(rates) < LEAST_RATES or rates[-1] < rates[0] * SPAN * 0.999:
            if (lower := self.within(rates[0] / STEP)) is None:
                break
            self.engine.add([lower])
            rates.insert(0, lower)
        return rates

    def inside(self, losses: dict[float, float], updates: int) -> dict[float, float]:
        """Return the losses with those of the next rates while the best stands at an end."""
        while math.isfinite(losses[best := least(losses)]):
            if best == min(losses) and (lower := self.within(best / STEP)) is not None:
                beyond = self.engine.below(best) or lower
            elif best == max(losses) and (above := self.above(best, updates)) is not None:
                beyond = above
            else:
                break
            self.engine.notes.append(
                f"After {updates:,} updates the best rate, {best:g}, was the lowest or the highest that was left, so "
                f"{beyond:g} was tried."
            )
            self.engine.add([beyond])
            losses = {**losses, **self.engine.losses([beyond], updates)}
        return losses

    def above(self, rate: float, updates: int) -> float | None:
        """Return the next higher rate; None if it failed at an earlier rung."""
        higher = min((other for other in self.engine.grid if other > rate), default=None)
        if higher is None:
            return self.within(rate * STEP)
        own = [one for trial, one in self.engine.results.items() if trial.rate == higher and trial.updates < updates]
        return None if any(one.failed for one in own) else higher

    def repeat(self, losses: dict[float, float]) -> None:
        """Repeat the best rate and the largest safe rate with the other seeds."""
        plan, engine = self.plan, self.engine
        fit = engine.fit_at_last(losses, plan.horizon, LOWER)
        self.close(plan.horizon, losses)
        if not fit:
            engine.notes.append(
                "No rate is eligible at the horizon: the model does not read its source. The best rate is that of the "
                "lowest loss, and was not repeated with other seeds."
            )
            return
        best = engine.confirmed(least(fit), plan.seeds[1:], plan.horizon, (plan.horizon,))
        ran = {trial.rate for trial in engine.results if trial.updates == plan.horizon and trial.warmup == PLANNED}
        self.close(plan.horizon, engine.losses(sorted(ran), plan.horizon))
        if best is None:
            engine.notes.append("No rate is eligible with every seed.")
            return
        self.record.best = best
        self.record.safe = self.repeated_safe(best)

    def repeated_safe(self, best: float) -> float:
        """Return the largest rate without a failure on any seed whose mean loss is within delta of the best rate's."""
        plan, engine = self.plan, self.engine
        delta = self.record.delta(plan.horizon)
        for rate in reversed(self.candidates(best, delta)):
            losses = engine.losses([rate], plan.horizon, plan.seeds)[rate]
            own = [self.record.result(rate, plan.horizon, seed) for seed in plan.seeds]
            if all(one.eligible and not one.failed for one in own):
                mean = engine.mean([RateTrial(best, seed, plan.horizon) for seed in plan.seeds])
                if losses - mean <= delta:
                    return rate
            engine.notes.append(
                f"At {rate:g} a seed failed, or the mean loss is more than {delta:.3g} above that of the best rate."
            )
        return best

    def candidates(self, best: float, delta: float) -> list[float]:
        """Return the rates above the best one that the first seed shows within delta of it, without a gap."""
        record, horizon = self.record, self.plan.horizon
        found = []
        for rate in sorted(rate for rate in record.rungs[horizon] if rate > best):
            one = record.result(rate, horizon)
            if one.failed or not one.eligible or not one.loss - record.result(best, horizon).loss <= delta:
                break
            found.append(rate)
        return found

    def try_warmups(self) -> None:
        """Run shorter warm-ups at the largest safe rate, the least first, until one is as good as the planned one."""
        plan, rate = self.plan, self.record.safe
        if rate is None or not plan.tried_warmups:
            return
        updates = warmup_rung(plan)
        self.engine.losses([rate], updates)  # a rate that was added later has not been read there
        for warmup in plan.tried_warmups:
            trial = RateTrial(rate, plan.seeds[0], updates, warmup)
            self.engine.run([trial])
            self.record.warmups.append(warmup)
            if excess(self.engine.results[trial], self.record.result(rate, updates)).mean <= self.record.delta(updates):
                return


def warmup_rung(plan: RatePlan) -> int:
    """Return the rung at which warm-ups are compared."""
    return next(updates for updates in plan.rungs if updates >= plan.trusted)
