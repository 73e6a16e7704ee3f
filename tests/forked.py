"""Runs of a sweep as forks of the process that tests, which has imported torch already: that takes most of the time of
a short run. tests/sweep/test_sweep_processes.py and test_sweep_killed.py start processes as a sweep does."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings

from stabilitylab import cli
from stabilitylab.sweep import launchers
from stabilitylab.sweep.jobs import Job


class Forked:
    """A job in a fork of this process; takes the place of ``launchers._LocalProcess``."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self._code: int | None = None
        with launchers._opened_log(job) as log, warnings.catch_warnings(action="ignore"):  # of threads of pytest-xdist
            self._child = os.fork()
            if self._child == 0:
                _run(job, environment, log.fileno())

    def poll(self) -> int | None:
        if self._code is None:
            child, status = os.waitpid(self._child, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if child else None
        return self._code

    def stop(self, asked: int) -> None:
        os.kill(self._child, signal.SIGINT if asked < 3 else signal.SIGKILL)


def _run(job: Job, environment: dict[str, str], log: int) -> None:
    """Run the command of a job, and end this process."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for own in (1, 2):
            os.dup2(log, own)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(environment)
        sys.argv = job.argv[2:]  # behind "python -m"
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL if each != signal.SIGINT else signal.default_int_handler)
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
