"""The progress of a sweep, on stderr: a live table on a terminal, a plain line for each run that ends elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .jobs import RUNNABLE, Job

SHOWN = 24  # runs at a time in the live table
TROUBLES = 4  # latest failures below the table


class Display:
    """The progress of a sweep on ``console``; a context manager, so that the terminal is restored."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self._all: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._troubles: list[str] = []
        self._began, self._work_before = time.monotonic(), 0.0
        self._live: Live | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def planned(self, jobs: Sequence[Job]) -> None:
        """Receive the jobs in their state before the sweep."""
        self._all = {job.name: job for job in jobs}
        self._began, self._work_before = time.monotonic(), self._work_done()
        todo, skipped = sum(job.state in RUNNABLE for job in jobs), [job for job in jobs if job.cell is not None]
        where = ""
        if skipped and skipped[0].ledger:
            runs = "it" if len(skipped) == 1 else "them"
            where = f", {len(skipped)} skipped, since {skipped[0].ledger.path} has {runs}"
        self._print(f"{len(jobs)} run{'' if len(jobs) == 1 else 's'}, {todo} to be made{where}")
        if todo and not self.quiet and self.console.is_terminal:
            self._live = Live(self.panel(), console=self.console, refresh_per_second=2, transient=True)
            self._live.start()

    def started(self, job: Job) -> None:
        self._running[job.name] = job
        if job.resumable:
            self._print(f"{job.name}: resumes at step {job.step}")
        self._update()

    def ended(self, job: Job, seconds: float, again: bool) -> None:
        """Report a job that has ended, and if it is tried again."""
        self._running.pop(job.name, None)
        self._all[job.name] = job
        words = [f"{job.state}", job.verdict if job.state == "finished" else job.reason]
        text = f"{job.name}: {': '.join(filter(None, words))} ({duration(seconds)})"
        if job.state == "failed":
            text += "; trying again" if again else f"; see {job.log_path}"
            self._troubles = [*self._troubles, text][-TROUBLES:]
        ended = sum(each.state not in RUNNABLE for each in self._all.values())
        self._print(f"{ended}/{len(self._all)}  {text}")
        self._update()

    def progress(self, running: Sequence[Job]) -> None:
        """Receive the present state of the running jobs."""
        self._running.update((job.name, job) for job in running if job.name in self._running)
        self._update()

    def panel(self) -> Group:
        """Return the live table: all runs as a bar, running ones as rows, the last failures as lines."""
        ended = sum(job.state not in RUNNABLE for job in self._all.values())
        head = Table.grid(padding=(0, 2))
        left = self.time_left()
        head.add_row(
            f"{ended}/{len(self._all)} runs",
            ProgressBar(total=1.0, completed=self._work_done() / max(self._work(), 1e-9), width=32),
            f"{duration(time.monotonic() - self._began)} so far",
            "" if left is None else f"about {duration(left)} left",
        )
        rows = Table("run", "state", "step", box=None, padding=(0, 1), header_style="bold")
        for job in list(self._running.values())[:SHOWN]:
            state = "starting" if job.state in RUNNABLE else job.state
            rows.add_row(job.name, state, f"{job.step}/{job.steps}" if job.experiment.kind == "train" else "")
        more = len(self._running) - SHOWN
        return Group(
            head, rows, *([Text(f"and {more} more")] if more > 0 else []), *(Text(t, "red") for t in self._troubles)
        )

    def time_left(self) -> float | None:
        """Estimate the seconds left, a run's work being layers times updates; None before any work was done."""
        done = self._work_done() - self._work_before
        return (time.monotonic() - self._began) * (self._work() - self._work_done()) / done if done > 0 else None

    def _work(self) -> float:
        return float(sum(_work(job) for job in self._all.values()))

    def _work_done(self) -> float:
        now = [self._running.get(name, job) for name, job in self._all.items()]
        return sum(_work(job) * (1.0 if job.state == "finished" else job.step / job.steps) for job in now)

    def _update(self) -> None:
        if self._live is not None:
            self._live.update(self.panel())

    def _print(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, soft_wrap=True, highlight=False, markup=False)


def _work(job: Job) -> float:
    return job.steps * job.experiment.config.model.depth


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
