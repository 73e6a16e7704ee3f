"""The check of a run against its own records: everything that can be checked, with one sentence for each fault."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..errors import InputError, UsageError
from ..schema import Table
from . import inventory
from .arrays import numbers
from .digest import fault, seal_of
from .documents import read_object, reseal
from .evaluation import FILE as EVALUATION
from .files import is_locked
from .incident import FILE as INCIDENT
from .incident import FOLDER, listed, rows_path
from .journal import read_records
from .layout import BLACK_BOX, METRICS, checkpoints, journal_path, journals, parts, tables_on_disk
from .parts import metrics_of, part_schema, read_part, table_of
from .reader import Run

DOCUMENTS = ("run.json", "status.json", INCIDENT, EVALUATION)


@dataclass
class Verified:
    """The result of a check: the number of rows and files, and the faults. ``live``: a process writes the run, so that
    it is not complete yet."""

    path: Path
    live: bool
    rows: int = 0
    files: int = 0
    unchecked: int = 0  # files from before there were checksums
    findings: list[str] = field(default_factory=list)

    def check(self, look: Callable[[], object]) -> None:
        """Call ``look``, and record its InputError or FileNotFoundError as a finding."""
        try:
            look()
        except (InputError, FileNotFoundError) as error:
            self.findings.append(str(error).rstrip("."))

    def say(self, finding: str) -> None:
        self.findings.append(finding)


def verify(path: str | Path) -> Verified:
    """Check a run directory: its JSON files, checksum, digest and schema of every part, parts against inventory and
    journals, the order of steps, checkpoints. Raises InputError if there is no run.

    A file of a run that is being written may change between two looks at it, so a fault of such a run is one that a
    second check finds as well.
    """
    found = _checked(Path(path))
    if found.live and found.findings:
        first, found = found.findings, _checked(Path(path))
        found.findings = [finding for finding in found.findings if finding in first]
    return found


def _checked(path: Path) -> Verified:
    found = Verified(path, is_locked(path) if path.is_dir() else False)
    try:
        run = Run.open(path)
    except InputError as error:
        if not (path / "run.json").is_file():
            raise
        found.say(str(error).rstrip("."))
        return found
    found.check(lambda: run.status)
    found.check(lambda: run.incident)
    found.check(lambda: run.evaluation)
    found.check(lambda: run.ledger)
    _documents(run, found)
    found.check(lambda: _incident_rows(run, found))
    found.check(lambda: _checkpoints(run, found))
    steps = _Steps()
    for name in [METRICS, *run.tables]:
        found.check(lambda name=name: _table(run, name, found, steps))
    found.check(lambda: _strangers(run, found))
    found.check(lambda: _journals(run, found))
    steps.judge(run, found)
    found.rows = len(steps.metrics)
    return found


def reseal_all(path: Path) -> list[Path]:
    """Give the JSON files of a run that somebody changed on purpose the checksum of their present content.

    Returns the files that needed one. Raises UsageError for a run that is being written, InputError for a file that is
    no JSON.
    """
    if path.is_dir() and is_locked(path):
        raise UsageError(f"{path} is being written: wait for it to end.")
    return [path / name for name in DOCUMENTS if (path / name).is_file() and reseal(path / name)]


def _documents(run: Run, found: Verified) -> None:
    """Count the JSON files, and those that an older version wrote without a checksum."""
    for name in DOCUMENTS:
        if (run.path / name).is_file():
            found.files += 1
            with suppress(InputError):  # said already
                found.unchecked += not read_object(run.path, name)[1]


def _incident_rows(run: Run, found: Verified) -> None:
    """Compare the rows around an incident with the digests in incident.json."""
    known = listed(run.path, run.identity) if (run.path / INCIDENT).is_file() else {}
    for name, digests in known.items():
        path = rows_path(run.path, name)
        if path.is_file():
            _digest(path, digests, found)
        else:
            found.say(f"{path} is missing, with the rows around the incident")
    present = {path.stem for path in (run.path / FOLDER).glob("*.parquet")}
    found.files += len(present)
    found.unchecked += len(present - known.keys())


class _Steps:
    """The steps of the metrics, and the steps of every table, which must be among them."""

    def __init__(self) -> None:
        self.metrics: np.ndarray = np.empty(0, np.int64)
        self.tables: dict[str, np.ndarray] = {}

    def judge(self, run: Run, found: Verified) -> None:
        steps = self.metrics
        if (late := np.flatnonzero(np.diff(steps) <= 0)).size:
            found.say(f"step {steps[late[0] + 1]} comes after step {steps[late[0]]}")
        if (gaps := np.flatnonzero(np.diff(steps) > 1)).size:
            first, last = int(steps[gaps[0]]) + 1, int(steps[gaps[0] + 1]) - 1
            more = f", and {len(gaps) - 1} more gaps" if len(gaps) > 1 else ""
            found.say(f"step{'' if first == last else 's'} {spelt(first, last)} are missing{more}")
        for name, own in self.tables.items():
            if (alone := np.setdiff1d(own, steps)).size:
                found.say(f"{name} has step {alone[0]}, of which there are no metrics")
        try:
            status = run.status
        except InputError:
            return  # said already
        last = int(steps.max(initial=-1))
        if status.state in ("finished", "diverged") and last < status.step - 1:
            found.say(f"it {status.state} at step {status.step}, and its rows end at step {last}")


def spelt(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _table(run: Run, name: str, found: Verified, steps: _Steps) -> None:
    """Check every part of a table, or the journal if the part does not exist yet."""
    waiting, done = journals(run.path), parts(run.path, name)
    listing = inventory.read(run.path, run.identity)
    lines = {} if listing is None else listing.of(name)
    for number in sorted(lines.keys() - done.keys() - waiting.keys()):
        found.say(f"part {number} of {name} ({lines[number][-1].steps()}) is missing")
    if listing is not None:
        for number in sorted(listing.unlisted(name, done, run.identity)):
            found.say(f"{inventory.FILE} does not list part {number} of {name}, so that lost parts may not show")
    seen = []
    for number in sorted(waiting.keys() | done.keys()):
        if number in done:
            found.files += 1
            if listing is not None and number in lines:
                _digest(done[number], {entry.sha256 for entry in lines[number]}, found)
            else:
                found.unchecked += 1
        try:
            piece = _piece(run, name, number, waiting, done)
        except InputError as error:
            found.say(str(error).rstrip("."))
            continue
        if piece is not None:
            seen.append(_whole_steps(run, name, number, piece, found))
    together = np.concatenate(seen) if seen else np.empty(0, np.int64)
    if name == METRICS:
        steps.metrics = together
    else:
        steps.tables[name] = together
        if (np.diff(together) <= 0).any():
            found.say(f"the steps of {name} do not follow each other")


def _piece(run: Run, name: str, number: int, waiting: dict[int, Path], done: dict[int, Path]) -> pa.Table | None:
    """Return the content of the part or of its journal. If both exist, raise InputError if they differ."""
    schema = None if name == METRICS else part_schema(run.table(name))
    part = read_part(run.path, done[number], schema, run.identity) if number in done else None
    if number not in waiting or (records := read_records(waiting[number], run.identity, number).table) is None:
        return part
    made = metrics_of(records, run.path) if name == METRICS else table_of(records, run.table(name), run.path)
    if part is not None and not _same(part, made):
        raise InputError(f"part {number} of {name} does not say what its journal says.")
    return made if part is None else part


def _same(part: pa.Table, made: pa.Table) -> bool:
    """True if part and journal are equal, NaN equal to NaN, bit for bit. A part of metrics may have columns that came
    later."""
    if not {*made.column_names} <= {*part.column_names}:
        return False
    part = part.select(made.column_names).cast(made.schema)
    return all(_bits(a) == _bits(b) for a, b in zip(part.columns, made.columns, strict=True))


def _bits(column: pa.ChunkedArray) -> object:
    if pa.types.is_float64(column.type):
        filled = numbers(column.fill_null(0.0))
        return filled.tobytes(), column.is_null().to_pylist()
    return column.to_pylist()


def _digest(path: Path, digests: Collection[str], found: Verified) -> None:
    with path.open("rb") as file:
        sha256 = file_digest(file, "sha256").hexdigest()
    if sha256 not in digests:
        found.say(f"{path} is not what was written (its digest is another): restore it from a copy")


def _whole_steps(run: Run, name: str, number: int, piece: pa.Table, found: Verified) -> np.ndarray:
    steps = numbers(piece["step"])
    if name == METRICS or not len(steps):  # a process that died while it began its first probed row
        return steps
    rows = len(run.table(name).rows)
    if len(steps) % rows or (steps.reshape(-1, rows) != steps[::rows, None]).any():
        found.say(f"part {number} of {name} holds half a step")
        return np.unique(steps)
    _places(run.table(name), piece, number, found)
    return steps[::rows]


def _places(table: Table, piece: pa.Table, number: int, found: Verified) -> None:
    """Report a part whose rows have other sites or layers than run.json."""
    for column in ("site", "layer"):
        expected = [getattr(row, column) for row in table.rows]
        told = piece[column].slice(0, len(expected)).to_pylist()
        if told != expected:
            found.say(f"part {number} of {table.name} has other places than run.json")
            return


def _strangers(run: Run, found: Verified) -> None:
    """Report tables that run.json lacks, a missing inventory, damaged or foreign lines of it, and missing journals."""
    for name in tables_on_disk(run.path):
        if name not in (METRICS, *run.tables):
            found.say(f"run.json has no table {name!r}, of which there is a folder")
    listing = inventory.read(run.path, run.identity)
    if listing is None:
        if run.manifest["schema_version"] >= inventory.SINCE:
            found.say(f"{inventory.FILE} is missing, so that lost parts would not show")
        return
    for complaint in listing.complaints():
        found.say(complaint)
    present = journals(run.path).keys() | parts(run.path, METRICS).keys()
    for number in sorted(listing.unread() - present):
        found.say(f"{journal_path(run.path, number).name} is missing, with rows that no part holds")


def _journals(run: Run, found: Verified) -> None:
    for number, path in journals(run.path).items():
        found.files += 1
        records = read_records(path, run.identity, number)
        if (complaint := records.complaint()) and (records.foreign or not found.live):  # a live one may end torn
            found.say(f"{path.name}: {complaint}")


def _checkpoints(run: Run, found: Verified) -> None:
    for path in checkpoints(run.path).values():
        found.files += 1
        found.unchecked += seal_of(path).whole is None
        if wrong := fault(path, run.identity):
            found.say(f"{path} is not what was written ({wrong}): remove it to resume from the one before")
    ranks = sorted((run.path / BLACK_BOX).glob("rank-*"))
    for folder in (BLACK_BOX, *(f"{BLACK_BOX}/{one.name}" for one in ranks)):
        for path in checkpoints(run.path, folder).values():
            found.files += 1
            if wrong := fault(path, run.identity):
                found.say(f"{path} is not what was written ({wrong}): restore it from a copy")
