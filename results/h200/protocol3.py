"""Protocol 3 at 18 layers a side, which a CPU makes in days: the search for the rates, the comparison at these rates,
and the rest: half the rates, the map of collapse, and the ramps.

Each arm is a process of ``results/tiny/make.py`` of its own, with WORKERS runs at a time. Their kernels are far smaller
than the GPU, so they run side by side under CUDA's multi-process service. Where it does not start, they would take
turns: every second arm of a search then runs on the processor's cores, which are idle.
Ledgers and tables lie in ``tiny/`` and come back whole; a run that has not ended begins anew on another machine. All
parts go on from the ledgers that are committed. The comparison needs the rates in ``protocol.SEARCH``, which are
committed before it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from place import ROOT, Clock, Place, Progress
from sharing import Job, carry, progress, side_by_side, together

from stabilitylab.experiments import Recipe, experiments, protocol

LAYERS = protocol.LAYERS[-1]
WORKERS = {"rungs": 6, "judged": 3}  # runs of an arm at a time: of a comparison few, so that whole seeds end early
TURNS = {"cuda": 1, "cpu": 7}  # the same of a search without the service, by what an arm runs on
FOLDER, RUNS = Path("tiny"), Path("tiny-runs")
CARRIED = {"rungs": ("rungs.csv", "rungs-choice.csv", "rungs-notes.md"), "judged": ("third",)}
SCRIPT = ROOT / "results" / "tiny" / "make.py"
ALL_AT_ONCE = 20  # runs of the rest at a time


def _of_the_map() -> int:
    return sum(one.config.model.encoder_layers == LAYERS for one in experiments("collapse:map", "tiny"))


REST: dict[str, Callable[[], int]] = {  # part of make.py -> its runs at this depth
    "half": lambda: len(protocol.HALVED_SEEDS) * len(protocol.SEARCHED_ARMS),
    "map": _of_the_map,
    "searched-ramps": lambda: len([*protocol.searched_ramps(Recipe("tiny", {}))]),
}


def rungs(place: Place, clock: Clock) -> Progress:
    """The rates of all arms that have none yet."""
    return _of_each_arm(place, clock, "rungs")


def judged(place: Place, clock: Clock) -> Progress:
    """The comparison at these rates."""
    if (refused := _refused()) and not place.smoke:
        return refused
    return _of_each_arm(place, clock, "judged")


def rest(place: Place, clock: Clock) -> Progress:
    """Half the rates, the map and the ramps, one after the other."""
    if place.smoke:
        return Progress("complete", "not tried without the corpus")
    if refused := _refused():
        return refused
    codes: dict[str, int | None] = {}
    with side_by_side(place.log, place.python) as is_shared:
        for part in REST:
            _carry(part)
            if not is_whole(part) and clock.left() > 1:
                job = _job(part, part, "--workers", str(ALL_AT_ONCE if is_shared else TURNS["cuda"]))
                codes |= together(place, clock, [job])
    return progress(sum(map(is_whole, REST)), len(REST), "parts", codes)


def _refused() -> Progress | None:
    open_arms = [arm for arm in protocol.SEARCHED_ARMS if LAYERS not in protocol.SEARCH[arm]]
    if not open_arms:
        return None
    return Progress("failed", f"no rate of {', '.join(open_arms)} in protocol.SEARCH: commit those of the search")


def _of_each_arm(place: Place, clock: Clock, part: str) -> Progress:
    if place.smoke:
        return Progress("complete", "not tried without the corpus")
    _carry(*CARRIED[part])
    left = [arm for arm in protocol.SEARCHED_ARMS if not is_done(part, arm)]
    with side_by_side(place.log, place.python) as is_shared:
        jobs = []
        for at, arm in enumerate(left):
            device = "cpu" if part == "rungs" and not is_shared and at % 2 else "cuda"
            workers = WORKERS[part] if is_shared else TURNS[device]
            named = f"{part}-{arm.replace(' ', '-')}"
            jobs.append(_job(part, named, "--arm", arm, "--workers", str(workers), device=device))
        codes = together(place, clock, jobs)
    done = sum(is_done(part, arm) for arm in protocol.SEARCHED_ARMS)
    return progress(done, len(protocol.SEARCHED_ARMS), "arms", codes)


def _job(part: str, name: str, *own: str, device: str = "cuda") -> Job:
    where = ("--data", "data", "--runs", str(RUNS), "--out", str(FOLDER))
    command = (str(SCRIPT), part, "--layers", str(LAYERS), *own, *where)
    return Job(name, command, FOLDER / f"{name}.txt", device)


def _carry(*names: str) -> None:
    for name in names:
        carry(SCRIPT.parent / name, FOLDER / name)


def is_done(part: str, arm: str) -> bool:
    """Say whether the search of an arm has ended, or all seeds of its comparison are in."""
    if part == "rungs":
        return rows(FOLDER / "rungs-choice.csv", arm=arm, layers=LAYERS) > 0
    found = rows(FOLDER / "third" / "ledger.csv", label=arm, layers=2 * LAYERS, lr=protocol.SEARCH[arm][LAYERS])
    return found >= len(protocol.JUDGED_SEEDS)


def is_whole(part: str) -> bool:
    """Say whether all runs of a part of the rest are in."""
    return rows(FOLDER / part / "ledger.csv", layers=2 * LAYERS) >= REST[part]()


def rows(path: Path, **cells: object) -> int:
    """Count the rows of a table with these cells; 0 where there is no table."""
    if not path.exists():
        return 0
    found = pd.read_csv(path)
    return int(np.logical_and.reduce([found[name] == value for name, value in cells.items()]).sum())
