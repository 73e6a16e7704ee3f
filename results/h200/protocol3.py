"""Protocol 3 at 18 layers a side, which a CPU makes in days: the search for the rates, and then the comparison.

Each arm is a process of ``results/tiny/make.py`` of its own, with WORKERS runs at a time. Their kernels are far smaller
than the GPU, so they run side by side under CUDA's multi-process service. Where it does not start, they would take
turns: every second arm of a search then runs on the processor's cores, which are idle.
Ledgers and tables lie in ``tiny/`` and come back whole; a run that has not ended begins anew on another machine. The
search goes on from the ledger that is committed. The comparison needs the rates in ``protocol.SEARCH``, which are
committed before it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from place import ROOT, Clock, Log, Place, Progress

from stabilitylab.experiments import protocol

LAYERS = protocol.LAYERS[-1]
WORKERS = {"rungs": 6, "judged": 3}  # runs of an arm at a time: of a comparison few, so that whole seeds end early
TURNS = {"cuda": 1, "cpu": 7}  # the same of a search without the service, by what an arm runs on
ASKS = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
FOLDER, RUNS = Path("tiny"), Path("tiny-runs")
CARRIED = ("rungs.csv", "rungs-choice.csv", "rungs-notes.md")
SCRIPT = ROOT / "results" / "tiny" / "make.py"


def rungs(place: Place, clock: Clock) -> Progress:
    """The rates of all arms that have none yet."""
    for name in CARRIED:
        if not (FOLDER / name).exists():
            FOLDER.mkdir(exist_ok=True)
            shutil.copyfile(SCRIPT.parent / name, FOLDER / name)
    return _of_each_arm(place, clock, "rungs")


def judged(place: Place, clock: Clock) -> Progress:
    """The comparison at these rates."""
    open_arms = [arm for arm in protocol.SEARCHED_ARMS if LAYERS not in protocol.SEARCH[arm]]
    if open_arms and not place.smoke:
        return Progress("failed", f"no rate of {', '.join(open_arms)} in protocol.SEARCH: commit those of the search")
    return _of_each_arm(place, clock, "judged")


def _of_each_arm(place: Place, clock: Clock, part: str) -> Progress:
    if place.smoke:
        return Progress("complete", "not tried without the corpus")
    left = [arm for arm in protocol.SEARCHED_ARMS if not is_done(part, arm)]

    def call(arm: str, device: str, workers: int) -> int | None:
        ours = ("--layers", str(LAYERS), "--arm", arm, "--workers", str(workers))
        command = [place.python, str(SCRIPT), part, *ours, "--data", "data", "--runs", str(RUNS), "--out", str(FOLDER)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        return place.call(command, clock, FOLDER / f"{part}-{arm.replace(' ', '-')}.txt", environment=hidden)

    with side_by_side(place.log, place.python) as is_shared, ThreadPoolExecutor(max(1, len(left))) as pool:
        devices = ["cpu" if part == "rungs" and not is_shared and at % 2 else "cuda" for at in range(len(left))]
        at_once = [WORKERS[part] if is_shared else TURNS[device] for device in devices]
        codes = dict(zip(left, pool.map(call, left, devices, at_once), strict=True))
    place.keep()
    failed = [f"{arm} (exit code {code})" for arm, code in codes.items() if code not in (0, None, 130, 143)]
    done = [arm for arm in protocol.SEARCHED_ARMS if is_done(part, arm)]
    said = f"{len(done)} of {len(protocol.SEARCHED_ARMS)} arms"
    if failed:
        return Progress("failed", f"{said}; failed: {', '.join(failed)}")
    return Progress("complete" if len(done) == len(protocol.SEARCHED_ARMS) else "partial", said)


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


def is_done(part: str, arm: str) -> bool:
    """Say whether the search of an arm has ended, or all seeds of its comparison are in."""
    if part == "rungs":
        return rows(FOLDER / "rungs-choice.csv", arm=arm, layers=LAYERS) > 0
    return rows(FOLDER / "third" / "ledger.csv", label=arm, layers=2 * LAYERS) >= len(protocol.JUDGED_SEEDS)


def rows(path: Path, **cells: object) -> int:
    """Count the rows of a table with these cells; 0 where there is no table."""
    if not path.exists():
        return 0
    found = pd.read_csv(path)
    return int(np.logical_and.reduce([found[name] == value for name, value in cells.items()]).sum())
