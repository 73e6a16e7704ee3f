"""The trials of a search: run one after another or by several processes, in a folder and within a budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..errors import InputError
from ..probes import random_states_kept
from .folder import SearchFolder, TrialEnd
from .halving import RatePlan, SearchStopped, warmup_rung
from .search import RateResult, RateTrial
from .subject import RateSubject
from .trial import RateRun

USUAL_RATES, USUAL_LATE = 9, 4  # rates of the first rung and of the last one, in an estimate
TIMED = 3  # updates whose time is taken before a search


class SearchAudience(Protocol):
    """The receiver of a search's progress."""

    def said(self, sentence: str) -> None:
        """Receive a sentence about the search."""

    def planned(self, rungs: Sequence[int], scores: str) -> None:
        """Receive the rungs, and the losses that rank the rates, before the first trial."""

    def moved(self, trial: RateTrial, update: int, loss: float) -> None:
        """Receive the latest loss of a trial."""

    def ended(self, trial: RateTrial, result: RateResult) -> None:
        """Receive the end of a trial."""

    def known(self, trial: RateTrial, result: RateResult) -> None:
        """Receive a trial that ended before."""


class Silence(SearchAudience):
    """The audience that hears nothing."""


@dataclass
class Budget:
    """The updates and the minutes that a search may take; None: no limit. ``seconds``: of one update, as measured."""

    updates: int | None = None
    minutes: float | None = None
    seconds: float = math.nan
    began: float = field(default_factory=time.monotonic)
    spent: int = 0

    @property
    def deadline(self) -> float:
        return math.inf if self.minutes is None else self.began + 60 * self.minutes

    @property
    def minutes_left(self) -> float:
        return (self.deadline - time.monotonic()) / 60

    def suffices(self, updates: int, jobs: int = 1) -> bool:
        """True if so many more updates fit."""
        if self.updates is not None and self.spent + updates > self.updates:
            return False
        if self.minutes is None or math.isnan(self.seconds):
            return True
        return time.monotonic() + updates * self.seconds / jobs <= self.deadline

    def sentence(self) -> str:
        if self.updates is not None:
            return f"{self.updates:,} updates"
        return f"{self.minutes:g} minute{'s' * (self.minutes != 1)}" if self.minutes is not None else "none"


Asked = Callable[[], str]  # "" or the name of the signal that asked to stop
Runner = Callable[[Sequence[RateTrial], Callable[[RateTrial, TrialEnd], None], Asked], None]


class FolderTrials:
    """Runs the trials that the folder lacks (:class:`.halving.BudgetedTrials`).

    ``runner``: runs several at a time; None: one after another in this process. ``asked``: the name of the signal that
    asks to stop, "" if none does.
    """

    def __init__(
        self,
        subject: RateSubject,
        plan: RatePlan,
        folder: SearchFolder,
        budget: Budget,
        audience: SearchAudience,
        asked: Asked = lambda: "",
        runner: Runner | None = None,
        jobs: int = 1,
    ) -> None:
        self.subject, self.plan, self.folder, self.budget = subject, plan, folder, budget
        self.audience, self.asked, self.jobs = audience, asked, jobs
        self.runner = runner or self._one_after_another

    def affords(self, trials: Sequence[RateTrial]) -> bool:
        return self.budget.suffices(sum(map(self.folder.ahead, trials)), self.jobs)

    def run(self, trials: Sequence[RateTrial]) -> Mapping[RateTrial, RateResult]:
        """Run the trials that have no result. Raises SearchStopped if the budget does not suffice for all of them, or
        if it was asked to stop."""
        missing = [trial for trial in trials if self.folder.find(trial) is None]
        for trial in trials:
            if (known := self.folder.find(trial)) is not None:
                self.audience.known(trial, known)
        if name := self.asked():
            raise SearchStopped("request", _asked(name))
        if missing and not self.affords(missing):
            cost = sum(map(self.folder.ahead, missing))
            raise SearchStopped(
                "budget",
                f"The budget ({self.budget.sentence()}) ended the search before its next stage, which needs {cost:,} "
                f"more updates for {len(missing)} trial{'s' * (len(missing) > 1)}.",
            )
        if missing:
            self.runner(missing, self._take, self._reason)
        return {trial: self._result(trial) for trial in trials}

    def _result(self, trial: RateTrial) -> RateResult:
        result = self.folder.find(trial)
        assert result is not None, "a trial that was run has a result"
        return result

    def _take(self, trial: RateTrial, end: TrialEnd) -> None:
        self.take_part(trial, end)
        self.audience.ended(trial, self._result(trial))

    def take_part(self, trial: RateTrial, end: TrialEnd) -> None:
        """Keep the results of a trial that was stopped at its present updates."""
        self.folder.add(trial, end)
        self.budget.spent += end.ran

    def _reason(self) -> str:
        """Return the reason to stop at once, "" to go on."""
        if name := self.asked():
            return _asked(name)
        if time.monotonic() > self.budget.deadline:
            return f"The budget ({self.budget.sentence()}) ended the search within a stage."
        return ""

    def _one_after_another(
        self, trials: Sequence[RateTrial], take: Callable[[RateTrial, TrialEnd], None], reason: Asked
    ) -> None:
        for trial in trials:
            run = RateRun(self.subject, self.plan, self.folder.path, trial)
            began = time.monotonic()
            try:
                end = run.run(reason, lambda t, loss, trial=trial: self.audience.moved(trial, t, loss))
            except SearchStopped:
                self.take_part(replace(trial, updates=run.t), run.end())
                raise
            if end.ran >= TIMED:
                self.budget.seconds = (time.monotonic() - began) / end.ran
            take(trial, end)


def _asked(name: str) -> str:
    return f"{name} stopped the search; continue it with --resume (resume=True)."


def seconds_of(subject: RateSubject, seed: int) -> float:
    """Return the wall seconds of one update, the median of three on a copy; the first update is not counted. Raises
    InputError if the loss is not finite before the first update."""
    with random_states_kept():
        made = subject.make(seed)
        made.set_rate(0.0)
        taken = []
        for t in range(TIMED + 1):
            began = time.monotonic()
            subject.enter(made.model, 0)
            number = 0.0
            for loss in subject.losses(made.model, 0, seed):
                loss.backward()
                number += float(loss.detach())
            if not math.isfinite(number):
                raise InputError(
                    f"the loss of {subject.name} is {number:g} before its first update, so that it trains at no rate: "
                    "'stabilitylab check' says where it comes from."
                )
            made.step(lambda optimizer: optimizer.step())
            made.zero_grad()
            if t:
                taken.append(time.monotonic() - began)
    return statistics.median(taken)


def need(plan: RatePlan) -> int:
    """Return the updates that a search usually needs: nine rates to ``trusted``, four to the horizon, the best and the
    largest safe rate with the other seeds, and one warm-up."""
    repeated = 2 * (len(plan.seeds) - 1) * plan.horizon
    warmups = warmup_rung(plan) if plan.tried_warmups else 0
    return USUAL_RATES * plan.trusted + USUAL_LATE * (plan.horizon - plan.trusted) + repeated + warmups


def beforehand(plan: RatePlan, budget: Budget, jobs: int = 1, done: int = 0) -> str:
    """Return one or two sentences about what a search needs and what the budget allows. ``done``: the updates that a
    continued search has done already."""
    updates = max(0, need(plan) - done)
    more = " more" if done else ""
    told = f"About {updates:,}{more} updates to a horizon of {plan.horizon:,}"
    if not math.isnan(budget.seconds):
        told += f", {duration(updates * budget.seconds / jobs)} at {budget.seconds:.2g} s an update"
    told += f"; rungs at {', '.join(f'{rung:,}' for rung in plan.rungs)}."
    if budget.suffices(updates, jobs):
        return told
    first = USUAL_RATES * plan.rungs[0] - done
    reach = [rung for rung in plan.rungs if budget.suffices(USUAL_RATES * min(rung, plan.trusted) - done, jobs)]
    if not reach:
        until = f"the first rung usually takes about {first:,} updates, so that the search may end without an answer"
    elif reach[-1] == plan.horizon:
        until = "the search reaches the horizon with fewer rates or repeats"
    else:
        until = f"the search reaches about {reach[-1]:,} updates"
    return f"{told} The budget ({budget.sentence()}) is smaller: {until}."


def duration(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 1.5:
        return "1 second" if seconds >= 0.5 else "less than a second"
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
