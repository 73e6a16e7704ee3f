"""One trial: a run at one rate with one seed, in a run directory of its own, that may be stopped and go on."""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UsageError
from ..probes import evaluation, random_states_kept
from ..probes.numerics import process_facts
from ..probes.state import random_states, seed_all, set_random_states
from ..store import Run, RunWriter
from ..store.layout import checkpoints
from ..train import checkpoint
from ..verdict import READS_NATS
from .folder import TrialEnd, name_of
from .halving import RatePlan, SearchStopped
from .search import PLANNED, RateResult, RateTrial
from .subject import RateSubject, TrialModel

APART, SHARE = 10, 20  # a loss is measured every 10 updates, and every twentieth of the updates so far later on
RISEN, LEAST_RISEN = 0.1, 3  # share of the updates so far, and number of measurements, through which a loss stays up
LOST = 0.5  # a loss has risen if it lost more than this share of its fall
SMOOTHED = 10  # training losses that are averaged where nothing is held out
PAIRED = 50  # training losses that two trials are paired over
Stop = Callable[[], str]  # "" to go on, else the reason
Tell = Callable[[int, float], None]  # update, latest loss


def is_due(t: int) -> bool:
    """True if the loss is measured after ``t`` updates, apart from the ends of rungs."""
    at = 0
    while at < t:
        at += max(APART, at // SHARE)
    return at == t


class RateRun:
    """Runs one trial up to a number of updates, and goes on from its checkpoint.

    ``plan`` has the rungs at which results are read. The random states of the process are put back at the end.
    """

    def __init__(self, subject: RateSubject, plan: RatePlan, out: Path, trial: RateTrial) -> None:
        self.subject, self.plan, self.trial = subject, plan, trial
        self.path = out / name_of(trial)
        self.warmup = (plan.warmup or 0) if trial.warmup == PLANNED else trial.warmup
        self.t, self.before, self.start = 0, 0, math.nan
        self.course: list[tuple[int, float]] = []  # losses as they were measured: updates, loss
        self.recent: deque[float] = deque(maxlen=PAIRED)  # training losses
        self.pending: dict[str, float] = {}  # measured after t updates, to be recorded in row t
        self.marks: dict[int, RateResult] = {}
        self.failed = ""

    def run(self, stop: Stop = lambda: "", tell: Tell = lambda t, loss: None) -> TrialEnd:
        """Run to the trial's updates. Raises SearchStopped, after a checkpoint, if ``stop`` gives a reason."""
        with random_states_kept():
            made, writer = self._begin()
            self.before = self.t
            try:
                self._measure(made)
                while self.t < self.trial.updates and not self.failed:
                    if reason := stop():
                        self._save(made, writer)
                        writer.set_status("interrupted", self.t, reason)
                        raise SearchStopped("request", reason)
                    self._update(made, writer)
                    if not self.failed:
                        self._measure(made)
                        tell(self.t, self.course[-1][1] if self.course else math.nan)
                if not self.failed:
                    self._save(made, writer)
                if self.pending:
                    writer.append(self.t, self.pending, {})  # a resume sets this row aside
                writer.set_status("diverged" if self.failed else "finished", self.t, self.failed)
            except SearchStopped:
                raise
            except BaseException as error:
                word = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                writer.set_status(word, self.t, f"{type(error).__name__}: {error}")
                raise
            finally:
                writer.close()
        return self.end()

    def end(self) -> TrialEnd:
        """Return the results so far."""
        return TrialEnd(self.marks, (self.t, self.failed) if self.failed else None, self.start, self.t - self.before)

    def _begin(self) -> tuple[TrialModel, RunWriter]:
        """Make the model, as new or from the newest checkpoint, and open the run directory."""
        state = self._loaded() if self.path.is_dir() and checkpoints(self.path) else None
        seed_all(self.trial.seed)
        made = self.subject.make(self.trial.seed)
        made.zero_grad()
        made.model.train()
        self.scaler = torch.amp.GradScaler(enabled=self.subject.scaled)
        seed_all(self.trial.seed)  # dropout: the same for every rate, however the model is made
        if state is None:
            if self.path.exists():
                shutil.rmtree(self.path)  # it ended before its first checkpoint
            writer = RunWriter.create(self.path, self._manifest(made))
        else:
            self._restore(made, state)
            writer = RunWriter.resume(self.path, state["part"], manifest=self._manifest(made))
        writer.open(())
        return made, writer

    def _update(self, made: TrialModel, writer: RunWriter) -> None:
        """Do update t, and record row t."""
        subject, t = self.subject, self.t
        subject.enter(made.model, t)
        rate = subject.rate_at(self.trial.rate, t, self.warmup)
        made.set_rate(rate)
        made.zero_grad()
        number = 0.0
        for loss in subject.losses(made.model, t, self.trial.seed):
            self.scaler.scale(loss).backward()
            number += float(loss.detach())
        self.recent.append(number)
        row = {**self.pending, "loss": number, "lr": rate}
        self.pending = {}
        if t == 0 and subject.held_out is None:
            self.start = number
            self.course.append((0, number))
        if not math.isfinite(number):
            writer.append(t, row, {})
            self.failed, self.t = f"the training loss is {number} at update {t}", t + 1
            return
        for optimizer in made.optimizers:
            self.scaler.unscale_(optimizer)
        row["grad_norm_total"] = _clipped(made.model, subject.clipping)
        made.step(self.scaler.step)
        self.scaler.update()
        made.zero_grad()
        writer.append(t, row, {})
        self.t = t + 1

    def _measure(self, made: TrialModel) -> None:
        """Measure the loss after t updates, if it is due, and decide if the trial has failed."""
        subject, t = self.subject, self.t
        ends = t in self.plan.rungs or t == self.trial.updates
        if self.course and self.course[-1][0] == t:  # a resume
            return
        if not (ends or is_due(t)):
            return
        if subject.held_out is None:
            if not t:
                return
            losses = list(self.recent)[-max(SMOOTHED, min(PAIRED, t // 10)) :]
            shown, loss = "smoothed_loss", float(np.mean(losses[-SMOOTHED:]))
        else:
            subject.enter(made.model, t)
            with evaluation(made.model):
                losses = [float(one) for one in subject.held_out(made.model)]
            shown, loss = subject.measured, float(np.mean(losses))
        if not t:
            self.start = loss
        self.course.append((t, loss))
        self.pending = {shown: loss}
        self.failed = self._fault()
        if ends and not self.failed:
            worth = subject.source_worth(made.model)
            if worth is not None:
                self.pending["source_worth"] = worth
            reads = worth is None or t < self.plan.horizon or worth >= READS_NATS
            self.marks[t] = RateResult(float(np.mean(losses)), reads, worth, tuple(losses), self.start)

    def _fault(self) -> str:
        """Return the reason if the losses so far show a failure: one is not finite, or they rose and stay up."""
        t, latest = self.course[-1]
        if not math.isfinite(latest):
            return f"the loss is {latest} after {t} updates"
        if t < self.plan.rungs[0]:
            return ""
        lowest, at = min((loss, step) for step, loss in self.course)
        margin = max(LOST * (self.start - lowest), self.plan.tolerance(self.start, lowest))
        count = max(LEAST_RISEN, sum(step >= (1 - RISEN) * t for step, _ in self.course))
        if len(self.course) > count and all(loss > lowest + margin for _, loss in self.course[-count:]):
            return f"the loss rose from {lowest:.3g} at update {at} to {latest:.3g} at update {t}, and stays up"
        return ""

    def _save(self, made: TrialModel, writer: RunWriter) -> None:
        """Write a checkpoint, from which a longer trial goes on."""
        state = {
            "digest": self._digest(),
            "part": writer.seal(),
            "t": self.t,
            "model": made.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in made.optimizers],
            "scaler": self.scaler.state_dict(),
            "random": random_states(),
            "start": self.start,
            "course": self.course,
            "recent": list(self.recent),
            "pending": self.pending,
            "marks": {t: asdict(one) for t, one in self.marks.items()},
        }
        checkpoint.save(self.path / "checkpoints", self.t, state, writer.run_id)

    def _restore(self, made: TrialModel, state: Mapping[str, Any]) -> None:
        made.model.load_state_dict(state["model"])
        for optimizer, own in zip(made.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        if self.subject.scaled:
            self.scaler.load_state_dict(state["scaler"])
        self.t, self.start, self.pending = state["t"], state["start"], dict(state["pending"])
        self.course = [(int(t), float(loss)) for t, loss in state["course"]]
        self.recent.extend(state["recent"])
        self.marks = {t: RateResult(**{**one, "losses": tuple(one["losses"])}) for t, one in state["marks"].items()}
        set_random_states(state["random"])

    def _loaded(self) -> dict[str, Any]:
        found = checkpoint.load(self.path / "checkpoints", torch.device("cpu"), Run.open(self.path).identity)
        if found.get("digest") != self._digest():
            raise UsageError(f"{self.path} is a trial of another search: give another --out.")
        return found

    def _digest(self) -> list[Any]:
        """Return the facts in which a trial must agree to go on."""
        return [self.subject.name, self.trial.rate, self.trial.seed, self.warmup, self.plan.horizon]

    def _manifest(self, made: TrialModel) -> dict[str, Any]:
        trial, subject = self.trial, self.subject
        own = "" if trial.warmup == PLANNED else f", warm-up {trial.warmup}"
        return {
            "kind": "watched",
            "label": f"{subject.name} {trial.rate:.3g}{own}",
            "config": {"lr": trial.rate, "seed": trial.seed, "warmup": self.warmup, "horizon": self.plan.horizon},
            **process_facts(next(made.model.parameters()).device),
            "lr_find": {
                "model": subject.name,
                "rate": trial.rate,
                "seed": trial.seed,
                "planned": trial.warmup == PLANNED,
                "searches": trial.seed == self.plan.seeds[0] and trial.warmup == PLANNED,
                "rungs": list(self.plan.rungs),
                "measured": "smoothed_loss" if subject.held_out is None else subject.measured,
            },
            **subject.manifest,
        }


def _clipped(model: torch.nn.Module, norm: float) -> float:
    """Clip the gradients to ``norm`` (0: not at all), and return their norm before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if norm:
        return float(torch.nn.utils.clip_grad_norm_(parameters, norm))
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
