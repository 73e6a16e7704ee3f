"""A sweep as Slurm arrays: submitted once, so that no process of ours has to outlive the ssh connection."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..errors import ResourceError, UsageError, bounded
from ..store.files import make_directory, replace_file, writing
from .jobs import OWN_FOLDER, RUNNABLE, Job, commands

LARGEST = 1000  # tasks of an array: Slurm's MaxArraySize is 1001 unless it was configured
WARNING = 120  # seconds before a time limit at which a task is asked to checkpoint
OURS = ("--array", "-a", "--parsable")  # options of sbatch that the sweep sets itself


@dataclass(frozen=True)
class Submitted:
    """An array job: its number in Slurm, its runs by task (from 1 on), and the script."""

    number: str
    names: tuple[str, ...]
    script: Path

    def sentence(self) -> str:
        runs = f"{len(self.names)} run{'s' * (len(self.names) > 1)}"
        return f"submitted {runs} as array job {self.number} ({self.script}); --status shows their state"


def submit(jobs: Sequence[Job], options: Sequence[str] = (), at_once: int | None = None) -> list[Submitted]:
    """Submit every job that is new, interrupted or failed as a task of an array, ``at_once`` at a time.

    Each task is ``probe --resume auto``, which continues its run, and says so if another task has it already.
    ``options`` go to ``sbatch``. Raises UsageError for an option that the sweep sets itself, ResourceError if there is
    no Slurm or it refuses.
    """
    if wrong := [option for option in options if option.partition("=")[0] in OURS]:
        raise UsageError(f"--sbatch {wrong[0]!r} is set by the sweep itself: leave it out.")
    for job in jobs:
        job.record()
    waiting = [job for job in jobs if job.state in RUNNABLE]
    done: list[Submitted] = []
    for number, first in enumerate(range(0, len(waiting), LARGEST), start=1):
        some = waiting[first : first + LARGEST]
        path = _written(some, number, at_once)
        try:
            done.append(Submitted(_sbatch(path, options), tuple(job.name for job in some), path))
        except ResourceError as error:
            before = f" (submitted before that: {', '.join(one.number for one in done)})" if done else ""
            raise ResourceError(f"{str(error).rstrip('.')}{before}.") from error
    return done


def _written(jobs: Sequence[Job], number: int, at_once: int | None) -> Path:
    """Write the script of an array beside its lines, one a task; return its path."""
    folder = (jobs[0].out / OWN_FOLDER / "slurm").resolve()
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{number}"
    with writing(folder):
        make_directory(folder)
    lines = folder / f"{stem}.lines"
    replace_file(lines, "".join(f"{line}\n" for line in _lines(jobs)).encode())
    most = "" if at_once is None else f"%{at_once}"
    head = [
        "#!/bin/bash",
        f"#SBATCH --array=1-{len(jobs)}{most}",
        "#SBATCH --job-name=stabilitylab",
        f"#SBATCH --output={folder}/%A_%a.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",  # after a preemption or a lost node it goes on from its checkpoint
        f"#SBATCH --signal=B:TERM@{WARNING}",
    ]
    body = [
        f"cd {shlex.quote(str(Path.cwd()))} || exit 5",
        f'eval "$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {shlex.quote(str(lines))})"',
    ]
    script = folder / f"{stem}.sh"
    replace_file(script, "\n".join([*head, *body, ""]).encode())
    return script


def _lines(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield one line a job: run it into its log, pass on signals that reach only the shell, end with its exit code."""
    for job in jobs:
        (line,) = commands([job])
        log = shlex.quote(str(job.log_path.resolve()))
        yield (
            f"echo {shlex.quote(f'$ {line}')} >> {log}; bash -c {shlex.quote(_exec(line))} >> {log} 2>&1 & run=$!; "
            'trap "kill -TERM $run" TERM; trap "kill -HUP $run" HUP; '
            "while :; do wait $run; code=$?; kill -0 $run 2> /dev/null || break; done; "
            f'echo "[exit $code]" >> {log}; exit $code'
        )


def _exec(line: str) -> str:
    """Return the line with its last command in the shell's own place, so that a signal reaches it."""
    moves, _, last = line.rpartition(" && ")
    return f"{moves} && exec env {last}" if moves else f"exec env {last}"


def _sbatch(script: Path, options: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ResourceError(
            f"cannot call sbatch ({error.strerror}): --launcher slurm-array needs Slurm; --print prints the commands "
            "for another scheduler."
        ) from error
    if done.returncode:
        said = bounded(done.stderr or done.stdout or f"exit {done.returncode}", 300).rstrip(".")
        raise ResourceError(f"sbatch refuses {script} ({said}): change the options in --sbatch.")
    return done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else "?"
