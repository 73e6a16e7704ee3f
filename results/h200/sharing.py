"""Many processes on one GPU: small models leave it idle, so that their runs share it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from place import Clock, Log, Place, Progress

ASKS = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
STOPPED = (0, None, 130, 143)  # exit codes of a process that ended well, or was asked to stop


@dataclass(frozen=True)
class Job:
    """A command of ours beside others. ``device``: "cuda", or "cpu", which hides the GPU from it."""

    name: str
    command: Sequence[str]
    output: Path
    device: str = "cuda"


def together(place: Place, clock: Clock, jobs: Sequence[Job]) -> dict[str, int | None]:
    """Run all jobs at once until they end or time is up; return their exit codes by name, None where time was up."""

    def call(job: Job) -> int | None:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
        return place.call([place.python, *job.command], clock, job.output, environment=hidden)

    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        codes = [*pool.map(call, jobs)]
    place.keep()
    return {job.name: code for job, code in zip(jobs, codes, strict=True)}


def progress(done: int, of: int, what: str, codes: Mapping[str, int | None]) -> Progress:
    """Say how a part stands, ``done`` of its parts being at their end; ``codes``: of the processes of this call."""
    said = f"{done} of {of} {what}"
    if failed := [f"{name} (exit code {code})" for name, code in codes.items() if code not in STOPPED]:
        return Progress("failed", f"{said}; failed: {', '.join(failed)}")
    return Progress("complete" if done == of else "partial", said)


def carry(source: Path, target: Path) -> None:
    """Copy a file or folder of committed tables, unless it is here already or there is none yet."""
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)


def ended_well(command: Sequence[str]) -> bool:
    """Run a command that takes seconds; False if it failed, or did not end within a minute."""
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def side_by_side(log: Log, python: str) -> Iterator[bool]:
    """Run CUDA's multi-process service meanwhile, by which kernels of several processes share the GPU's processors;
    yields whether it runs.

    Where it does not start, or a process that asks for it gets no GPU, the log says so, and processes take turns.
    """
    control, folder = shutil.which("nvidia-cuda-mps-control"), Path("mps").absolute()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    works = False
    if control is not None:
        for each in own.values():
            Path(each).mkdir(parents=True, exist_ok=True)
        os.environ.update(own)
        works = ended_well([control, "-d"]) and ended_well([python, "-c", ASKS])
    if not works:
        for name in own:
            os.environ.pop(name, None)
    log.line(f"the processes {'run side by side' if works else 'take turns: no multi-process service starts here'}")
    try:
        yield works
    finally:
        for name in own:
            os.environ.pop(name, None)
        if control is not None:
            subprocess.run([control], input="quit\n", text=True, check=False, env=os.environ | own, timeout=30)
