"""The committed corpus: runs, and their signals row by row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

HERE = Path(__file__).parent
HORIZON, AFTER = 200, 5  # an alarm between t* - 200 and t* + 5 is a hit
FIRST = 20  # rows before this one are compared with nothing
BENIGN = 50  # rows after a benign rise in which an alarm is counted apart
LATE = 50  # failures later than this row can be led


@dataclass
class CorpusRun:
    """One run and what became of it. ``columns``: its signals, (rows,) each; ``fault``: the row of a fault from
    outside, ``failed``: t*, by ``why``; ``open``: undecided at its end."""

    name: str
    subject: str
    family: str
    kind: str
    seed: int
    rows: int
    fault: int | None
    failed: int | None
    benign: tuple[int, ...]
    open: bool
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    why: str = ""

    @property
    def arch(self) -> str:
        return self.subject.split("-")[0]

    @property
    def cluster(self) -> str:
        """What shares a twin."""
        return f"{self.subject}-s{self.seed}"

    @property
    def outcome(self) -> str:
        """``failure`` (from within, t* > 50), ``early`` (t* before), ``fault`` (from outside), ``healthy``, "open"."""
        if self.fault is not None:
            return "fault" if self.failed is None or self.failed >= self.fault else "early"
        if self.failed is not None:
            return "failure" if self.failed > LATE else "early"
        return "open" if self.open else "healthy"

    @property
    def healthy(self) -> np.ndarray:
        """(rows,) bool: where an alarm is false."""
        found = np.zeros(self.rows, dtype=bool)
        if self.outcome in ("healthy", "fault"):
            found[FIRST : self.rows if self.fault is None else self.fault] = True
            for rise in self.benign:
                found[rise : rise + BENIGN] = False
        return found


def read(half: str, folder: Path = HERE) -> list[CorpusRun]:
    """The runs of ``train`` or ``test``, in the order of runs.csv."""
    seeds: dict[int, dict[int, dict[str, np.ndarray]]] = {}
    found = []
    for run in lines(folder):
        if run["half"] != half:
            continue
        seed = int(run["seed"])
        if seed not in seeds:
            seeds[seed] = features(folder / features_of(seed))
        made = _run(run)
        made.columns = seeds[seed][int(run["number"])]
        found.append(made)
    return found


def features_of(seed: int) -> str:
    return f"features/seed-{seed}.parquet"


def features(path: Path) -> dict[int, dict[str, np.ndarray]]:
    """Number of the run -> its columns, (rows,) each."""
    table = pq.read_table(path)
    names = [name for name in table.column_names if name not in ("run", "row")]
    code = table["run"].to_numpy()
    starts = np.flatnonzero(np.append(True, code[1:] != code[:-1]))
    ends = np.append(starts[1:], len(code))
    data = {name: table[name].to_numpy().astype(np.float64) for name in names}
    return {
        int(code[start]): {name: own[start:end] for name, own in data.items()}
        for start, end in zip(starts, ends, strict=True)
    }


def lines(folder: Path = HERE, table: str = "runs.csv") -> Iterator[dict[str, str]]:
    with (folder / table).open(newline="") as file:
        yield from csv.DictReader(file)


def _run(line: dict[str, str]) -> CorpusRun:
    def whole(name: str) -> int | None:
        return int(line[name]) if line[name] else None

    return CorpusRun(
        line["run"],
        line["subject"],
        line["family"],
        line["kind"],
        int(line["seed"]),
        int(line["rows"]),
        whole("at"),
        whole("failed"),
        tuple(json.loads(line["benign"])),
        bool(line["open"]),
        why=line["why"],
    )
