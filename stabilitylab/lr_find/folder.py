"""The folder of a search: its plan, a line for every trial that has ended, and the answer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, UsageError
from ..store.documents import plain
from ..store.files import replace_file, writing
from ..store.layout import checkpoints
from .halving import RatePlan
from .search import PLANNED, RateResult, RateTrial

PLAN, TRIALS, ANSWER = "plan.json", "trials.jsonl", "lr-find.json"


def name_of(trial: RateTrial) -> str:
    """Return the name of the run directory. It does not say the updates, since a longer trial continues the run."""
    own = "" if trial.warmup == PLANNED else f"-w{trial.warmup}"
    return f"lr{trial.rate:g}-s{trial.seed}{own}"


@dataclass(frozen=True)
class TrialEnd:
    """The result of a run so far. ``marks``: updates of a rung -> result; ``failed``: the update and the reason of a
    failure; ``ran``: updates of this call."""

    marks: Mapping[int, RateResult]
    failed: tuple[int, str] | None
    start: float
    ran: int

    def at(self, updates: int) -> RateResult:
        """Return the result after so many updates; that of a failure if it failed before."""
        if updates in self.marks:
            return self.marks[updates]
        assert self.failed is not None, "a run that did not fail has a result at every rung"
        return RateResult(math.inf, eligible=False, start=self.start, failed=self.failed[1])


class SearchFolder:
    """The folder ``path``: a run directory for each trial, and the files of the search beside them.

    A line of trials.jsonl is synced before :meth:`add` returns, and a torn last line is left out when it is read.
    ``config``: the settings of a reference model, kept beside the plan. Raises UsageError if ``path`` holds a search
    and ``resume`` is False, or a search with another plan.
    """

    def __init__(
        self,
        path: Path,
        plan: RatePlan,
        facts: Mapping[str, Any],
        resume: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        own = json.loads(json.dumps({**asdict(plan), **facts}))
        if (path / PLAN).exists():
            before = _read(path / PLAN)
            if not resume:
                raise UsageError(f"{path} holds a search: go on with --resume (resume=True), or give another --out.")
            if wrong := next((key for key in own if before.get(key) != own[key]), None):
                raise UsageError(
                    f"the search in {path} has {wrong} = {before.get(wrong)!r}, not {own[wrong]!r}: give the value "
                    "that the search was begun with, or another --out."
                )
        elif path.exists() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty and holds no search: give another --out.")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            kept = {**own, "config": config} if config else own
            replace_file(path / PLAN, (json.dumps(kept, indent=2) + "\n").encode())
        self.results: dict[RateTrial, RateResult] = {}
        self.reached: dict[RateTrial, int] = {}  # updates that the run of a trial has done; keys have updates = 0
        self.failed: dict[RateTrial, RateResult] = {}
        self.cost = 0
        for line in self._lines():
            self._take(line)

    def find(self, trial: RateTrial) -> RateResult | None:
        """Return the result of a trial: what was read when its run passed there, or its failure before."""
        if trial in self.results:
            return self.results[trial]
        return self.failed.get(_run(trial))

    def ahead(self, trial: RateTrial) -> int:
        """Return the updates that a trial still needs."""
        return 0 if self.find(trial) is not None else max(0, trial.updates - self.reached.get(_run(trial), 0))

    def add(self, trial: RateTrial, end: TrialEnd) -> None:
        """Append the results of a run."""
        marks = {str(updates): asdict(one) for updates, one in end.marks.items()}
        failed = None if end.failed is None else asdict(end.at(end.failed[0] + 1))
        line = {
            "rate": trial.rate, "seed": trial.seed, "warmup": trial.warmup, "updates": trial.updates,
            "ran": end.ran, "marks": marks, "failed": failed,
        }  # fmt: skip
        with writing(self.path), (self.path / TRIALS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def write_answer(self, answer: Mapping[str, Any]) -> None:
        """Write the answer as JSON: numbers that are not finite become text."""
        text = json.dumps(plain(answer), indent=2) + "\n"
        with writing(self.path):
            replace_file(self.path / ANSWER, text.encode())

    def discard_checkpoints(self) -> None:
        """Remove the checkpoints of the trials, which a search that has ended does not need."""
        for run in {name_of(trial) for trial in self.reached}:
            for path in checkpoints(self.path / run).values() if (self.path / run).is_dir() else ():
                path.unlink(missing_ok=True)

    def _take(self, line: Mapping[str, Any]) -> None:
        run = RateTrial(float(line["rate"]), int(line["seed"]), 0, int(line["warmup"]))
        for updates, one in line["marks"].items():
            self.results[RateTrial(run.rate, run.seed, int(updates), run.warmup)] = _result(one)
        if line["failed"] is not None:
            self.failed[run] = _result(line["failed"])
        self.reached[run] = int(line["updates"])
        self.cost += int(line["ran"])

    def _lines(self) -> list[dict[str, Any]]:
        path = self.path / TRIALS
        if not path.exists():
            return []
        found = []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                if number == len(lines) - 1:
                    replace_file(path, "".join(lines[:-1]).encode())  # torn by a crash: its trial goes on
                    break
                raise InputError(
                    f"line {number + 1} of {path} cannot be read: restore the file, or give another --out."
                ) from error
        return found


def _run(trial: RateTrial) -> RateTrial:
    return RateTrial(trial.rate, trial.seed, 0, trial.warmup)


def _result(one: Mapping[str, Any]) -> RateResult:
    return RateResult(**{**one, "losses": tuple(one["losses"]), "loss": float(one["loss"])})


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it, or give another --out.") from error


def plan_at(path: Path) -> dict[str, Any]:
    """Return the plan of the search in ``path``, or of its first width; {} if there is none."""
    first = next((one for one in (path / PLAN, *sorted(path.glob(f"width-*/{PLAN}"))) if one.exists()), None)
    return {} if first is None else _read(first)


def is_search(path: Path) -> bool:
    """True if ``path`` is the folder of a search."""
    return (path / PLAN).exists()
