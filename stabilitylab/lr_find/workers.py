"""Several trials of a search at a time, each in a process of its own that makes the model anew."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import ResourceError, StabilityLabError
from ..stopping import undisturbed
from .folder import TrialEnd
from .halving import RatePlan, SearchStopped
from .search import RateTrial
from .subject import RateSubject
from .trial import RateRun

SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks
PATIENCE = 0.2  # seconds between two looks at the budget and at signals
TOLD = 0.5  # seconds between two messages of a worker about its progress
DIED = "a process of the search was killed, perhaps because memory ran out: give fewer --jobs"


class RateWorkers:
    """Runs trials in ``jobs`` processes (:data:`.trials.Runner`); a context manager, which ends the processes.

    ``subject``: makes the subject; a function that a process can import, with arguments that can be pickled. The
    numbers do not depend on ``jobs``.
    """

    def __init__(self, jobs: int, subject: Callable[[], RateSubject], plan: RatePlan, out: Path) -> None:
        self._given = subject, plan, out
        self._stop = SPAWN.Event()
        self._workers: list[_Worker] = []
        self._jobs = jobs
        self.moved: Callable[[RateTrial, int, float], None] = lambda trial, update, loss: None
        self.stopped: Callable[[RateTrial, TrialEnd], None] = lambda trial, end: None

    def __enter__(self) -> RateWorkers:
        with undisturbed():  # the parent passes a request to stop on
            self._workers = [_Worker(self._stop, *self._given) for _ in range(self._jobs)]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def __call__(
        self, trials: Sequence[RateTrial], take: Callable[[RateTrial, TrialEnd], None], reason: Callable[[], str]
    ) -> None:
        """Run the trials. Raises SearchStopped once all processes have stopped, if ``reason`` gives one."""
        waiting, why = deque(trials), ""
        self._stop.clear()
        while True:
            why = why or reason()
            if why:
                self._stop.set()
                waiting.clear()
            for worker in self._workers:
                if worker.trial is None and waiting:
                    worker.give(waiting.popleft())
            busy = [worker for worker in self._workers if worker.trial is not None]
            if not busy:
                break
            ready = wait([worker.pipe for worker in busy], timeout=PATIENCE)
            for worker in busy:
                if worker.pipe in ready:
                    self._hear(worker, take)
        if why:
            raise SearchStopped("request", why)

    def _hear(self, worker: _Worker, take: Callable[[RateTrial, TrialEnd], None]) -> None:
        trial = worker.trial
        assert trial is not None
        word, told = worker.hear()
        if word == "moved":
            self.moved(trial, *told)
            return
        worker.trial = None
        if word == "error":
            raise told
        if word == "stopped":
            updates, end = told
            self.stopped(replace(trial, updates=updates), end)
        else:
            take(trial, told)


class _Worker:
    """A process that runs one trial at a time."""

    def __init__(self, stop: Any, subject: Callable[[], RateSubject], plan: RatePlan, out: Path) -> None:
        self.trial: RateTrial | None = None
        self.pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(theirs, stop, subject, plan, out), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, trial: RateTrial) -> None:
        self.trial = trial
        with suppress(ConnectionError):  # the process has died, which ``hear`` reports
            self.pipe.send(trial)

    def hear(self) -> tuple[str, Any]:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return "error", ResourceError(f"{DIED}, and continue with --resume.")

    def end(self) -> None:
        if self.trial is not None:  # after an error of another trial
            self._process.terminate()
        self.pipe.close()
        self._process.join()


def serve(pipe: Connection, stop: Any, make: Callable[[], RateSubject], plan: RatePlan, out: Path) -> None:
    """Run trials until the pipe ends; the work of a worker's process."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group; the parent passes them on by ``stop``
        signal.signal(number, signal.SIG_IGN)
    subject: RateSubject | None = None
    while True:
        try:
            trial = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            subject = subject or make()
            pipe.send(_carried_out(pipe, stop, RateRun(subject, plan, out, trial)))
        except StabilityLabError as error:
            pipe.send(("error", error))
        except Exception as error:
            pipe.send(("error", StabilityLabError(f"{trial.rate:g}: {type(error).__name__}: {error}")))


def _carried_out(pipe: Connection, stop: Any, run: RateRun) -> tuple[str, Any]:
    """Run a trial; return the message about its end."""
    latest = time.monotonic()

    def tell(update: int, loss: float) -> None:
        nonlocal latest
        if time.monotonic() - latest > TOLD:
            latest = time.monotonic()
            pipe.send(("moved", (update, loss)))

    try:
        return "end", run.run(lambda: "the search was stopped" if stop.is_set() else "", tell)
    except SearchStopped:
        return "stopped", (run.t, run.end())
