"""Many one-step runs, several at a time. A process that dies ends only its own run."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ..config import Config, validated
from ..errors import StabilityLabError, UsageError
from ..store import Run
from .measurement import measure, settled

SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks
DIED = "its process was killed, perhaps for want of memory: use fewer jobs, or a smaller model"


def measure_all(
    todo: Sequence[tuple[str, Config]],
    out: Path,
    jobs: int,
    done: Callable[[str], None],
) -> dict[str, str]:
    """Measure each (name, configuration) into ``out/name``, ``jobs`` at a time on one thread each; return name ->
    reason, for the runs that failed.

    Finished runs (:func:`is_finished`) are kept, others are made again; ``done`` is called with the name of each
    finished run. The numbers do not depend on ``jobs``. On Ctrl-C the processes end at once, and finished runs stay.
    """
    failed: dict[str, str] = {}
    waiting: deque[tuple[str, Config]] = deque()
    for name, config in dict(todo).items():
        config = config.changed(train={"threads": 1})
        try:
            if is_finished(out / name, config):
                done(name)
            else:
                waiting.append((name, config))
        except StabilityLabError as error:
            failed[name] = str(error)
    workers = [Worker(out) for _ in range(min(max(1, jobs), len(waiting)))]
    try:
        while True:
            for worker in workers:
                if worker.name is None and waiting:
                    worker.give(*waiting.popleft())
            busy = [worker for worker in workers if worker.name is not None]
            if not busy:
                return failed
            ready = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                name, sentence = worker.take()
                if sentence:
                    failed[name] = sentence
                else:
                    done(name)
    finally:
        for worker in workers:
            worker.end()


def is_finished(path: Path, config: Config) -> bool:
    """True if ``path`` holds a finished measurement of this configuration. An unfinished one-step run there is removed.

    Raises UsageError if ``path`` holds anything else: a run that another process writes, or another configuration.
    """
    if not (path / "run.json").exists():
        return False  # nothing, or the remains of a writer; the next writer refuses anything else
    run = Run.open(path)
    state = run.status.state
    if run.manifest.get("kind") != "onestep" or state == "running":
        what = "is being written by another process" if state == "running" else "holds a run of another kind"
        raise UsageError(f"{path} {what}: choose another folder.")
    if state != "finished":
        shutil.rmtree(path)
        return False
    if _stored(run) != settled(config):
        raise UsageError(f"{path} holds a one-step run of another configuration: choose another folder, or remove it.")
    return True


def _stored(run: Run) -> Config | None:
    try:
        return validated(run.config)
    except UsageError:  # a run of another version, with settings that this version does not know
        return None


class Worker:
    """A process that measures one configuration at a time. If it dies, the next ``give`` starts another."""

    def __init__(self, out: Path) -> None:
        self.name: str | None = None
        self._out = out
        self._start()

    def give(self, name: str, config: Config) -> None:
        if not self._process.is_alive():
            self.end()
            self._start()
        self.name = name
        with suppress(ConnectionError):  # the process has just died, which ``take`` reports
            self.pipe.send((name, config))

    def take(self) -> tuple[str, str]:
        """Wait for the present configuration; return (name, "" or a sentence about the error)."""
        assert self.name is not None
        name, self.name = self.name, None
        try:
            return name, self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            return name, DIED

    def end(self) -> None:
        self._process.terminate()
        self._process.join()
        self.pipe.close()

    def _start(self) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=serve, args=(theirs, self._out), daemon=True)
        self._process.start()
        theirs.close()  # else the pipe would outlive the process


def serve(pipe: Connection, out: Path) -> None:
    """Measure configurations until the pipe ends; runs in the worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches both; the parent ends its workers
    while True:
        try:
            name, config = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            measure(config, out, name)
            sentence = ""
        except StabilityLabError as error:
            sentence = str(error)
        except Exception as error:  # one run's defect must not end the others
            sentence = f"{type(error).__name__}: {error}"
        pipe.send(sentence)
