"""The committed second corpus: its runs, row by row, with their labels; and what keeps the test half closed."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).parents[3] / "benchmarks" / "faults"))
sys.path.insert(1, str(Path(__file__).parents[1]))

from corpus import LATE, CorpusRun, features
from second_labels import Labels, labels

HERE = Path(__file__).parent
FROZEN = "frozen.json"
ACCUSED = ("warning", "failure")  # verdicts of diagnose


@dataclass
class SecondRun(CorpusRun):
    """A run with its labels. ``failed`` is the row at which its event was full-blown, and ``benign`` the rows of blips
    and of rises that came back, so that what scores the first corpus scores this one."""

    labels: Labels = field(default_factory=Labels)
    edge: float = math.nan
    half: str = ""
    diagnosis: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ "failure" (an event after row 50), "early" (an event before), "fault" (from outside), "collapse", "slow",
        "open" or "healthy". An event before a fault from outside is early."""
        event = self.labels.event
        if self.fault is not None:
            return "fault" if event is None or event.began >= self.fault else "early"
        if event is not None:
            return "failure" if event.full > LATE else "early"
        return self.labels.outcome

    @property
    def is_accused(self) -> bool:
        """True if diagnose warned, or said that it failed."""
        return self.diagnosis["verdict"] in ACCUSED

    @property
    def is_failure(self) -> bool:
        """True if it has an event or a collapse, wherever it came from."""
        return self.labels.failed is not None


def lines(folder: Path = HERE, table: str = "runs.csv") -> Iterator[dict[str, str]]:
    with (folder / table).open(newline="") as file:
        yield from csv.DictReader(file)


def features_of(half: str, seed: int, subject: str) -> str:
    return f"features/calibrate-{subject}.parquet" if half == "calibrate" else f"features/seed-{seed}.parquet"


def read(halves: Sequence[str], folder: Path = HERE) -> list[SecondRun]:
    """Return the runs of these halves, in the order of runs.csv; of a subject and seed whose twin is not healthy the
    twin alone, since its other runs have nothing to be compared with. Raises SystemExit for another half than "choose"
    as long as frozen.json is not committed."""
    if {*halves} - {"choose"}:
        refuse_unfrozen(folder)
    own = [line for line in lines(folder) if line["half"] in halves]
    names = dict.fromkeys(features_of(line["half"], int(line["seed"]), line["subject"]) for line in own)
    known = {name: features(folder / name) for name in names}
    found = [_run(line, known[features_of(line["half"], int(line["seed"]), line["subject"])]) for line in own]
    twins = {run.cluster: run for run in found if run.family == "twin"}
    for run in found:
        run.labels = labels(run.columns, None if run.family == "twin" else twins[run.cluster].columns)
        run.failed = None if run.labels.event is None else run.labels.event.full
        run.benign = run.labels.passing
        run.open = run.outcome == "open"
        run.why = "" if run.labels.event is None else run.labels.event.kind
    broken = {name for name, run in twins.items() if run.outcome != "healthy"}
    return [run for run in found if run.family == "twin" or run.cluster not in broken]


def _run(line: Mapping[str, str], columns: Mapping[int, dict[str, np.ndarray]]) -> SecondRun:
    return SecondRun(
        line["run"],
        line["subject"],
        line["family"],
        line["kind"],
        int(line["seed"]),
        int(line["rows"]),
        int(line["at"]) if line["at"] else None,
        None,
        (),
        False,
        columns[int(line["number"])],
        edge=float(line["edge"]),
        half=line["half"],
        diagnosis=json.loads(line["diagnosis"]),
    )


def refuse_unfrozen(folder: Path) -> None:
    """End with a sentence if frozen.json of this folder is not committed as it is: the test half is opened once, after
    everything that is chosen is fixed."""
    if not is_committed(folder / FROZEN):
        raise SystemExit(
            f"{folder / FROZEN} is not committed: make it with results/alarm/second/second_freeze.py and commit it "
            "before the test half is opened."
        )


def is_committed(path: Path) -> bool:
    """True if the file is in the last commit of its repository, and is as it is there."""
    if not path.exists():
        return False
    shown = subprocess.run(["git", "show", f"HEAD:./{path.name}"], cwd=path.parent, capture_output=True, check=False)
    return shown.returncode == 0 and shown.stdout == path.read_bytes()
