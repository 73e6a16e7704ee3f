"""The run of a sweep: start jobs, retry failures, stop in good order."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from ..errors import InputError, StabilityLabError, UsageError
from ..stopping import listening
from ..store.files import writing
from .jobs import RUNNABLE, STOPPED, Job, State, last_words, prepare
from .launchers import Launcher, Local, Parsl, Process

POLL, REFRESH = 0.1, 2.0  # least seconds between two looks at the processes, and at their run directories
REST = 50  # the pause after a look at run directories, in units of its duration: a long journal is slow to read
SIGNALS = {number.value: number.name for number in signal.Signals}
USAGE = 2  # the exit code of a wrong setting: trying again is no use


class Audience(Protocol):
    """The receiver of a sweep's progress."""

    def planned(self, jobs: Sequence[Job]) -> None:
        """Receive the jobs in their state before the sweep."""

    def started(self, job: Job) -> None:
        """Receive a job whose process has started."""

    def ended(self, job: Job, seconds: float, again: bool) -> None:
        """Receive a job that has ended; ``again``: it is tried again."""

    def progress(self, running: Sequence[Job]) -> None:
        """Receive the present state of the running jobs."""


class Silent(Audience):
    """An audience that ignores everything."""


@dataclass(frozen=True)
class Outcome:
    """The end of a sweep: its jobs in their present state, and the signal that stopped it, if one did."""

    jobs: list[Job]
    signal: int | None = None

    def count(self, state: State) -> int:
        return sum(job.state == state for job in self.jobs)

    @property
    def exit_code(self) -> int:
        """Return 0 if all runs have ended; 1 if one failed, or another process still writes it; 128 + the signal that
        stopped the sweep (130 for Ctrl-C)."""
        if self.signal is not None:
            return 128 + self.signal
        return 1 if any(job.state != "finished" for job in self.jobs) else 0

    def sentence(self) -> str:
        states: tuple[State, ...] = ("finished", "failed", "interrupted", "running", "new")
        counts = [f"{self.count(state)} {state}" for state in states if self.count(state)]
        skipped = [job for job in self.jobs if job.cell is not None]
        where = f" ({len(skipped)} only in {skipped[0].ledger.path})" if skipped and skipped[0].ledger else ""
        return f"{len(self.jobs)} run{'' if len(self.jobs) == 1 else 's'}: {', '.join(counts) or 'none'}{where}"


@dataclass
class _Attempt:
    job: Job
    process: Process
    started: float = field(default_factory=time.monotonic)


def run(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    launcher: Literal["local", "parsl"] | Launcher = "local",
    retries: int = 1,
    audience: Audience | None = None,
    gpus: Sequence[str] = (),
    parsl_config: Path | None = None,
    until: float | None = None,
) -> Outcome:
    """Run every job that is new, interrupted or failed, each in a process of its own; return the jobs in their last
    state.

    ``workers`` run at a time, distributed over ``gpus`` (by CUDA_VISIBLE_DEVICES). A failed job is tried ``retries``
    times more, from its checkpoint if it has one. The first SIGINT, SIGTERM or SIGHUP asks the processes to stop after
    a checkpoint; a Ctrl-C at least a second later stops them at once, and one more kills them
    (:mod:`stabilitylab.stopping`). ``until``, a time of :func:`time.monotonic`, acts as a SIGTERM.
    """
    _check(jobs, workers, retries, gpus)
    audience = audience or Silent()
    waiting = deque(job for job in jobs if job.state in RUNNABLE)
    latest = {job.name: job for job in jobs}
    audience.planned(jobs)
    if jobs and jobs[0].ledger is not None:
        jobs[0].ledger.prepare()
    for job in jobs:
        job.record()
    if not waiting:
        return Outcome(list(jobs))
    crew = _crew(launcher, jobs[0].out, min(workers, len(waiting)), gpus, parsl_config)
    attempts: dict[str, int] = {}
    active: list[_Attempt] = []
    look = 0.0  # time of the next look at run directories
    try:
        with listening() as caught:
            asked = 0
            while active or (waiting and not caught.count):
                if until is not None and time.monotonic() >= until:
                    until = None
                    caught.hear(signal.SIGTERM)
                while waiting and crew.free() and not caught.count:
                    job, ready = _prepared(waiting.popleft())
                    latest[job.name] = job
                    if not ready:
                        job.record()
                        audience.ended(job, 0.0, False)
                        continue
                    attempts[job.name] = attempts.get(job.name, 0) + 1
                    active.append(_Attempt(job, crew.start(job)))
                    audience.started(job)
                while asked < caught.count:
                    asked += 1
                    for attempt in active:
                        attempt.process.stop(asked)
                for attempt in active[:]:
                    if (code := attempt.process.poll()) is None:
                        continue
                    active.remove(attempt)
                    job, seconds = _ended(attempt, code)
                    latest[job.name] = job
                    job.record()
                    left = attempts[job.name] <= retries and code != USAGE and not caught.count
                    again = job.state in RUNNABLE and left
                    if again:
                        waiting.append(job)
                    audience.ended(job, seconds, again)
                if (begun := time.monotonic()) > look:
                    audience.progress([_glimpse(attempt.job) for attempt in active])
                    look = after_look(begun, time.monotonic())
                time.sleep(POLL)
    finally:
        _stop_all(active)
        crew.close()
    return Outcome([latest[job.name] for job in jobs], caught.signal)


def after_look(begun: float, ended: float) -> float:
    """Return the time at which run directories are read again: reading takes at most 2 % of a core."""
    return ended + max(REFRESH, REST * (ended - begun))


def _check(jobs: Sequence[Job], workers: int, retries: int, gpus: Sequence[str]) -> None:
    if workers < 1:
        raise UsageError(f"--jobs {workers}: give 1 or more.")
    if retries < 0:
        raise UsageError(f"--retries {retries}: give 0 or more.")
    for job in jobs:
        device = job.experiment.config.train.device
        if gpus and device not in ("auto", "cuda", "cuda:0"):
            raise UsageError(f"--gpus gives each run one GPU, and {job.name} asks for {device!r}: use --device auto.")


def _crew(
    launcher: Literal["local", "parsl"] | Launcher, out: Path, workers: int, gpus: Sequence[str], config: Path | None
) -> Launcher:
    if config is not None and launcher != "parsl":
        raise UsageError("--parsl-config goes with --launcher parsl.")
    if launcher == "local":
        return Local(workers, gpus)
    if launcher == "parsl":
        if gpus:
            raise UsageError("--gpus goes with --launcher local: a Parsl executor has available_accelerators.")
        return Parsl(out, workers, config)
    if isinstance(launcher, str):
        raise UsageError(f"unknown launcher {launcher!r}; choose one of local, parsl.")
    return launcher


def _prepared(job: Job) -> tuple[Job, bool]:
    """Return the job ready to start and True; or, if another process has taken or changed it, its present state and
    False."""
    try:
        job = prepare(job)
    except (InputError, UsageError) as error:
        return replace(job, state="failed", reason=str(error)), False
    return job, job.state in RUNNABLE


def _ended(attempt: _Attempt, code: int) -> tuple[Job, float]:
    """Return the job as its process left it, and its seconds. A job that did not finish, and that no process writes,
    has failed."""
    seconds = time.monotonic() - attempt.started
    job = attempt.job
    with writing(job.log_path), job.log_path.open("a") as log:
        log.write(f"[exit {code}]\n")
    try:
        after = job.now()
    except StabilityLabError as error:
        return replace(job, state="failed", reason=str(error)), seconds
    if after.state in ("finished", "running") or (code in STOPPED and after.state != "failed"):
        return after, seconds
    number = -code if code < 0 else code - 128  # a shell's way to say it, under Parsl
    reason = f"killed by {SIGNALS.get(number, f'signal {number}')}" if number > 0 else last_words(job)
    return replace(after, state="failed", reason=reason), seconds


def _glimpse(job: Job) -> Job:
    """Return the job in its present state, if that can be read at this moment; else as it was."""
    try:
        return job.now()
    except StabilityLabError:
        return job


def _stop_all(active: Sequence[_Attempt]) -> None:
    """Stop every process after an error of the sweep itself, so that none is left behind."""
    for attempt in active:
        attempt.process.stop(1)
    for attempt in active:
        while attempt.process.poll() is None:
            time.sleep(POLL)
