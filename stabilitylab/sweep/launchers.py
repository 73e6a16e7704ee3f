"""The processes of a sweep, started on this machine or through Parsl's configuration."""

from __future__ import annotations

import math
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from ..environment import RUNS_PER_DEVICE
from ..errors import InputError, ResourceError, UsageError
from ..store.files import is_locked, writing
from .jobs import OWN_FOLDER, Job

GRACE = 10.0  # seconds after a request to stop; a process that has no run by then never began

LOST = 60.0  # seconds that a run may go on writing after Parsl has lost its process


class Process(Protocol):
    """A job that was started."""

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        ...

    def stop(self, asked: int) -> None:
        """Ask the process to end: the first time after a checkpoint, the second time at once; the third time it is
        killed."""
        ...


class Launcher(Protocol):
    """Starts jobs; ``free`` is True if it takes another job."""

    def free(self) -> bool: ...

    def start(self, job: Job) -> Process: ...

    def close(self) -> None: ...


class Local:
    """Runs ``workers`` processes at a time on this machine, distributed over ``gpus`` if some are named.

    They start at once, before any of them has taken its memory, so each is told how many share its device.
    """

    def __init__(self, workers: int = 1, gpus: Sequence[str] = ()) -> None:
        self._slots: list[_LocalProcess | None] = [None] * workers
        self._gpus = tuple(gpus)

    def free(self) -> bool:
        return any(process is None or process.poll() is not None for process in self._slots)

    def start(self, job: Job) -> Process:
        slot = next(i for i, process in enumerate(self._slots) if process is None or process.poll() is not None)
        environment = {**os.environ, **job.environment}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        environment[RUNS_PER_DEVICE] = str(math.ceil(len(self._slots) / max(1, len(self._gpus))))
        process = self._slots[slot] = _LocalProcess(job, environment)
        return process

    def close(self) -> None:
        """Do nothing: local processes have ended before this call."""


class _LocalProcess:
    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        with _opened_log(job) as log:
            # A session of its own: a terminal's Ctrl-C reaches the sweep alone, which passes it on once.
            self._process = subprocess.Popen(
                job.argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, asked: int) -> None:
        self._process.send_signal(signal.SIGINT if asked < 3 else signal.SIGKILL)


def _opened_log(job: Job) -> IO[bytes]:
    with writing(job.log_path):
        log = job.log_path.open("ab", buffering=0)
        log.write(f"$ {shlex.join(job.argv)}\n".encode())
    return log


class Parsl:
    """Runs a job as one Parsl app. The apps check for a file that asks them to stop, since no signal reaches other
    machines."""

    def __init__(self, out: Path, workers: int = 1, config: Path | None = None) -> None:
        try:
            import parsl
        except ImportError as error:
            raise ResourceError(
                "--launcher parsl needs Parsl: install it with pip install 'stabilitylab[sweep]'."
            ) from error
        self._stop = out.resolve() / OWN_FOLDER / f".stop-{uuid.uuid4().hex}"
        settings = _parsl_config(config, workers)
        if settings.run_dir == "runinfo":  # Parsl's default, a folder in the current one
            settings.run_dir = str(out.resolve() / OWN_FOLDER / "parsl")
        # Parsl looks for scripts of its own on PATH, where those of an environment that is not activated are not.
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        try:
            self._kernel = parsl.DataFlowKernel(settings)
        except Exception as error:  # an executor of the user's may raise anything if it cannot start
            raise ResourceError(f"Parsl cannot start its executors: {type(error).__name__}: {error}.") from error
        self._app = parsl.bash_app(data_flow_kernel=self._kernel)(shell_line)

    def free(self) -> bool:
        return True  # Parsl queues what its executors cannot take yet

    def start(self, job: Job) -> Process:
        line = script(job.argv, job.environment, log=job.log_path, stop=self._stop, folder=Path.cwd())
        return _ParslProcess(self._app(line), job, self._stop)

    def close(self) -> None:
        self._kernel.cleanup()
        self._stop.unlink(missing_ok=True)


def shell_line(line: str) -> str:
    """Return the command for Parsl's workers."""
    return line


def script(argv: Sequence[str], environment: dict[str, str], *, log: Path, stop: Path, folder: Path) -> str:
    """Return a bash script that runs ``argv`` in ``folder`` into ``log``, and once ``stop`` exists asks it to end.

    Its exit code is that of ``argv``; ``argv`` does not begin if ``stop`` exists already.
    """
    command, q = shlex.join(argv), shlex.quote
    log_file, stop_file = q(str(log)), q(str(stop))
    return "\n".join(
        (
            f"[ -e {stop_file} ] && exit {128 + signal.SIGINT}",
            f"cd {q(str(folder))} || exit 5",
            "set -m",  # the run gets a process group of its own, which a terminal's Ctrl-C does not reach
            *(f"export {key}={q(value)}" for key, value in environment.items()),
            f"echo {q(f'$ {command}')} >> {log_file}",
            # Survives a terminal's Ctrl-C and the signals of a scheduler, which sends them to the run as well.
            "trap : INT TERM HUP",
            "asked=''",
            f"{command} < /dev/null >> {log_file} 2>&1 &",
            "run=$!",
            # The group stands. On the sweep's terminal job control would announce the run's end, and the shell a kill.
            "set +m",
            f"exec 2>> {log_file}",
            "while kill -0 $run 2> /dev/null; do",
            f"  [ -z $asked ] && [ -e {stop_file} ] && asked=1 && kill -TERM $run",  # one only: a second means at once
            "  sleep 0.3",
            "done",
            "wait $run",
        )
    )


class _ParslProcess:
    def __init__(self, future: Any, job: Job, stop: Path) -> None:
        self._future, self._job, self._file = future, job, stop
        self._asked: float | None = None
        self._lost: float | None = None

    def poll(self) -> int | None:
        if not self._future.done():
            never_began = self._asked is not None and time.monotonic() > self._asked + GRACE
            return 128 + signal.SIGINT if never_began and not is_locked(self._job.path) else None
        error = self._future.exception()
        if error is None:
            return 0
        if (code := getattr(error, "exitcode", None)) is not None:
            return int(code)
        if self._lost is None:  # Parsl failed, not the run: its node was taken away, for example
            self._lost = time.monotonic()
            with suppress(OSError), self._job.log_path.open("a") as log:
                log.write(f"parsl: {type(error).__name__}: {error}\n")
        at_work = is_locked(self._job.path) and time.monotonic() < self._lost + LOST  # it writes its checkpoint
        return None if at_work else 1

    def stop(self, asked: int) -> None:
        if self._asked is None:
            self._asked = time.monotonic()
        with writing(self._file):
            self._file.touch()


def _parsl_config(path: Path | None, workers: int) -> Any:
    from parsl.config import Config
    from parsl.executors import ThreadPoolExecutor

    if path is None:
        return Config(executors=[ThreadPoolExecutor(label="local", max_threads=workers)], initialize_logging=False)
    try:
        found = runpy.run_path(str(path)).get("config")
    except Exception as error:  # the user's program may raise anything
        raise InputError(f"cannot read the Parsl configuration {path}: {type(error).__name__}: {error}.") from error
    if not isinstance(found, Config):
        raise UsageError(f"{path} must define 'config', a parsl.config.Config; see docs/sweeps.md.")
    return found
