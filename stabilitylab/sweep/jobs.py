"""Jobs: an experiment, its run directory, and its state on the disk. Nothing here needs torch."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..config import complete
from ..errors import InputError, UsageError, listed
from ..experiments import Experiment
from ..inputs import shown
from ..registry import PLUGINS, named_plugins
from ..store import Run
from ..store.existing import in_the_way
from ..store.files import Lock, is_locked, make_directory, replace_file, writing
from ..store.layout import checkpoints, is_run_name
from . import toml
from .identity import content, deciding
from .ledger import Cell, Ledger

State = Literal["new", "running", "finished", "interrupted", "failed"]
RUNNABLE: tuple[State, ...] = ("new", "interrupted", "failed")
OWN_FOLDER = "sweep"  # below the folder of the runs: configurations, logs, directories that were moved aside
ENDED = re.compile(r"\[exit (-?\d+)\]")  # the line with which the log of an attempt ends
# Exit codes of a process that was asked to stop: its own, or the signal's if it came before there was a run.
STOPPED = tuple(code for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) for code in (128 + number, -number))
_TRAINING = ("train.", "probes.")  # settings that do not change a run of one step, except for its seed


@dataclass(frozen=True)
class Job:
    """One run of a sweep in its state on the disk.

    ``new``: no run directory; ``running``: a live process writes it; ``finished``: trained to its end, diverged or not;
    ``interrupted``, ``failed``: with ``reason``. ``resumable``: it has a checkpoint, possibly that of the last update,
    when only its end is missing. ``cell``: its line in the ``ledger``, which makes it finished if no run has ended in
    its directory.
    """

    experiment: Experiment
    out: Path
    state: State = "new"
    step: int = 0
    reason: str = ""
    verdict: str = ""
    resumable: bool = False
    ledger: Ledger | None = None
    cell: Cell | None = None

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def path(self) -> Path:
        return self.out / self.name

    @property
    def config_path(self) -> Path:
        return self.out / OWN_FOLDER / f"{self.name}.toml"

    @property
    def log_path(self) -> Path:
        return self.out / OWN_FOLDER / f"{self.name}.log"

    @property
    def steps(self) -> int:
        """Return the number of updates of the whole run; 1 for a run of one step."""
        return self.experiment.config.train.steps if self.experiment.kind == "train" else 1

    @property
    def environment(self) -> dict[str, str]:
        """Return variables that the process needs before it starts: the OpenMP pool is sized once, plug-ins are
        named."""
        plugins = {PLUGINS: ",".join(named)} if (named := named_plugins()) else {}
        return {"OMP_NUM_THREADS": str(self.experiment.config.train.threads), **plugins}

    @property
    def argv(self) -> list[str]:
        """Return the command that starts or continues the run."""
        what = ["probe", "--resume", "auto"] if self.experiment.kind == "train" else ["onestep"]
        where = ["--config", str(self.config_path), "--name", self.name, "--out", str(self.out)]
        return [sys.executable, "-m", "stabilitylab", *what, *where, "-q"]

    def now(self) -> Job:
        """Return the job in its present state."""
        return examine(self.experiment, self.out, self.ledger)

    def record(self) -> None:
        """Append a training run that has ended here to the ledger, if there is one. A line that the ledger has stays
        unchanged."""
        ended_here = self.state == "finished" and self.cell is None and _has_line(self.experiment)
        if self.ledger is not None and ended_here and self.ledger.find(self.experiment.config) is None:
            self.ledger.add(Run.open(self.path))


def plan(experiments: Iterable[Experiment], out: Path, ledger: Ledger | None = None) -> list[Job]:
    """Return a job for each experiment, with the run directory ``out/<name>``; runs in ``ledger`` are finished.

    Raises UsageError if two experiments have one name, or if a run of that name has another configuration, and
    InputError if a run cannot be read, or if its data have changed.
    """
    experiments = list(experiments)
    for name, count in Counter(experiment.name for experiment in experiments).items():
        if count > 1 or name == OWN_FOLDER or not is_run_name(name):
            raise UsageError(f"{shown(name)} cannot name {'two runs' if count > 1 else 'a run'} of a sweep: rename it.")
    return [examine(experiment, out, ledger) for experiment in experiments]


def examine(experiment: Experiment, out: Path, ledger: Ledger | None = None) -> Job:
    """Return the job of ``experiment`` from its run directory and, if no run has ended there, from the ledger."""
    job = replace(_on_disk(experiment, out), ledger=ledger)
    if ledger is None or job.state not in RUNNABLE or not _has_line(experiment):
        return job
    if (cell := ledger.find(experiment.config)) is None:
        return job
    verdict, step = cell.get("verdict", ""), int(cell.get("step") or job.steps)
    return replace(job, state="finished", step=step, reason="", verdict=verdict, resumable=False, cell=cell)


def _has_line(experiment: Experiment) -> bool:
    """True if a ledger keeps the run. It keeps no run of one step, whose results are tables."""
    return experiment.kind == "train"


def _on_disk(experiment: Experiment, out: Path) -> Job:
    job = Job(experiment, out)
    if not (job.path / "run.json").exists():
        return _not_begun(job)
    run = Run.open(job.path)
    stopped = _stopped_early(run, experiment)
    _check_same(run, stopped or experiment)
    status = run.status
    if stopped is not None and status.state in ("finished", "diverged"):
        reason = f"it was made to stop at update {status.step} of {job.steps}"
        resumable = _last_checkpoint(job.path) > 0
        if resumable:
            _check_data(run)
        return replace(job, state="interrupted", step=status.step, reason=reason, resumable=resumable)
    state: Any = "finished" if status.state == "diverged" else status.state
    verdict = found.state if (found := run.verdict) else ""
    resumable = state in ("interrupted", "failed") and 0 < _last_checkpoint(job.path) <= job.steps
    if resumable or state == "finished":  # another run is moved aside, or belongs to a process
        _check_data(run)
    return Job(experiment, out, state, status.step, status.reason, verdict, resumable)


def _stopped_early(run: Run, experiment: Experiment) -> Experiment | None:
    """Return ``experiment`` with the updates of ``run``, if the run has the same schedule and fewer updates."""
    train = experiment.config.train
    stored = complete(run.config).get("train") or {}
    steps = stored.get("steps")
    if experiment.kind != "train" or not isinstance(steps, int) or steps >= train.steps:
        return None
    if (stored.get("horizon") or steps) != train.span:
        return None
    shorter = experiment.config.changed(train={"steps": steps, "horizon": train.span})
    return replace(experiment, config=shorter)


def _not_begun(job: Job) -> Job:
    if job.path.is_dir():
        if in_the_way(job.path):  # not the remains of a run that died while it began
            raise InputError(f"{job.path} holds files but no run: move it elsewhere, or choose another --out.")
        if is_locked(job.path):
            return Job(job.experiment, job.out, "running")
    lines = log_lines(job.log_path)
    if lines and (end := ENDED.fullmatch(lines[-1])) and int(end[1]) not in (0, *STOPPED):
        return Job(job.experiment, job.out, "failed", reason=last_words(job))
    return job


def _last_checkpoint(path: Path) -> int:
    """Return the number of updates in the newest checkpoint; 0 if there is none."""
    return max(checkpoints(path), default=0)


def _check_same(run: Run, experiment: Experiment) -> None:
    """Raise UsageError if a finished run of the same name is not the same run."""
    advice = "choose another --out, or move it away"
    if (kind := run.manifest.get("kind", "train")) != experiment.kind:
        raise UsageError(f"{run.path} is a run of kind {kind!r}, where {experiment.kind!r} is asked for: {advice}.")
    stored, wanted = deciding(run.config), deciding(experiment.config.model_dump(mode="json"))
    for key, value in wanted.items():
        if experiment.kind == "onestep" and key.startswith(_TRAINING) and key != "train.seed":
            continue
        if (there := stored.get(key)) != value:
            raise UsageError(f"{run.path} has {key} = {there!r}, where {value!r} is asked for: {advice}.")


def _check_data(run: Run) -> None:
    """Raise InputError if a file that ``run`` read has another content now.

    A file that is gone proves nothing. A run of an older version, or of another source than text, has no digests of
    files.
    """
    digests = (run.manifest.get("data") or {}).get("files_sha256") or {}
    if changed := [name for name, digest in digests.items() if os.path.isfile(name) and content(Path(name)) != digest]:
        raise InputError(
            f"the data of {run.path} have changed since it started ({listed(changed)}): restore them, choose another "
            "--out, or move the run away."
        )


def prepare(job: Job) -> Job:
    """Make ``job`` ready to start in its present state: write its configuration, and move a run aside that cannot be
    resumed.

    A job that has ended, or that another process writes, is returned unchanged, to be left alone.
    """
    job = job.now()
    if job.state in RUNNABLE:
        replace_file(job.config_path, toml.dumps(job.experiment.config).encode())
        make_way(job)
    return job


def make_way(job: Job) -> None:
    """Move a run aside that has not ended and has no checkpoint to continue from, so that it can start anew."""
    if _must_make_way(job):
        _move_aside(job)


def _must_make_way(job: Job) -> bool:
    return job.state in RUNNABLE and not job.resumable and (job.path / "run.json").exists()


def _free_place(job: Job) -> Path:
    places = (job.out / OWN_FOLDER / "aside" / f"{job.name}-{i}" for i in range(1, 10**6))
    return next(place for place in places if not place.exists())


def _move_aside(job: Job) -> None:
    """Move a run without a checkpoint aside, and rename its run.json so that no report counts it."""
    lock = Lock(job.path)  # nobody may begin to write it while it moves
    try:
        place = _free_place(job)
        with writing(place):
            make_directory(place.parent)
            (job.path / "run.json").rename(job.path / "run.json.aside")
            job.path.rename(place)
    finally:
        lock.release()


def commands(jobs: Iterable[Job]) -> list[str]:
    """Return a shell line for each job that is still to be run, to be started in the current folder, and write its
    configuration. If a run of one step is made again, its line first moves the old directory aside."""
    lines = []
    for job in jobs:
        if job.state not in RUNNABLE:
            continue
        replace_file(job.config_path, toml.dumps(job.experiment.config).encode())
        line = " ".join(
            (*(f"{key}={shlex.quote(value)}" for key, value in job.environment.items()), shlex.join(job.argv))
        )
        if job.experiment.kind != "train" and _must_make_way(job):
            place, old = _free_place(job), job.path
            moves = (
                ["mkdir", "-p", str(place.parent)],
                ["mv", str(old / "run.json"), str(old / "run.json.aside")],
                ["mv", str(old), str(place)],
            )
            line = " && ".join((*map(shlex.join, moves), line))
        lines.append(line)
    return lines


def status_table(jobs: Iterable[Job]) -> list[dict[str, str]]:
    """Return a row a job, in words: run, state, verdict, step, reason."""
    return [
        {
            "run": job.name,
            "state": job.state,
            "verdict": job.verdict or "-",
            "step": f"{job.step}/{job.steps}" if job.experiment.kind == "train" and job.state != "new" else "-",
            "reason": _reason(job),
        }
        for job in jobs
    ]


def _reason(job: Job) -> str:
    if job.ledger is not None and job.cell is not None:
        return f"in {job.ledger.path} since {job.cell['finished']}"
    return job.reason if job.state in ("interrupted", "failed") else ""


def log_lines(path: Path) -> list[str]:
    """Return the lines at the end of a log, without empty ones."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return []


def last_words(job: Job) -> str:
    """Return the last line that the process of ``job`` wrote."""
    words: Sequence[str] = [
        line for line in log_lines(job.log_path) if not ENDED.fullmatch(line) and not line.startswith("$ ")
    ]
    return words[-1].removeprefix("stabilitylab: ") if words else "it wrote no message"
