"""What the benchmarks share: a clock, alternating rounds, medians with intervals, the line that names the machine, the
cost of a command, and a sink that keeps nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from stabilitylab.schema import Cells, Table

Work = Callable[[], object]
RESAMPLES = 4000


class Middle(NamedTuple):
    """A median and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def middle(values: np.ndarray) -> Middle:
    """Of what is finite; the resamples are the same in every call, so that a table can be made again."""
    values = values[np.isfinite(values)]
    medians = np.median(np.random.default_rng(0).choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Middle(float(np.median(values)), float(low), float(high))


def seconds(work: Work, device: torch.device) -> float:
    """CPU time of this process, all threads; on a GPU wall time from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - began
    began = time.process_time()
    work()
    return time.process_time() - began


def rounds(
    works: Mapping[str, Callable[[], float]], count: int, slow: Collection[str] = (), few: int = 0
) -> dict[str, np.ndarray]:
    """Seconds that each returns, one after the other in every round, in reverse in each second one (ABBA).

    Those that are ``slow`` take part in the first ``few`` rounds, and have NaN in the others.
    """
    rows = []
    for turn in range(count):
        names = [name for name in works if turn < few or name not in slow]
        rows.append({name: works[name]() for name in (names if turn % 2 else names[::-1])})
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in works}


def machine(device: torch.device) -> str:
    """Processor or GPU, threads, versions, and how busy the machine was in the last five minutes."""
    if device.type == "cuda":
        chip = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        chip = f"{_processor()} with {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{chip}, {versions}; load of the machine meanwhile {os.getloadavg()[1]:.1f}"


def _processor() -> str:
    """The model that Linux names; elsewhere the kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


class Used(NamedTuple):
    """What a process took: seconds of wall and of CPU time, its peak memory [MiB], and its exit code."""

    wall: float
    cpu: float
    memory: float
    code: int


def command(*arguments: str) -> Used:
    """Run ``stabilitylab`` as a user would, in a process of its own; what it prints is dropped."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "stabilitylab", *arguments], stdout=subprocess.DEVNULL)
    _, state, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(state)
    wall = time.perf_counter() - began
    return Used(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**10, process.returncode)


class Nowhere:
    """A sink that keeps nothing."""

    def open(self, tables: Sequence[Table]) -> None: ...

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def close(self) -> None: ...
