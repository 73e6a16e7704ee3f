"""The pieces that a run's tables are made of: its parts, and the journals that are not parts yet."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa

from ..errors import DamagedError
from ..schema import Table
from . import inventory
from .files import is_locked
from .inventory import Entry
from .journal import Records, read_records
from .layout import METRICS, journals, part_path, parts
from .parts import metrics_of, read_part, table_of
from .telling import tell

Parts = Mapping[int, Path]
Identity = tuple[int, int, int]  # inode, size and time of the last change: a file that was replaced has another


class ReplacedError(DamagedError):
    """A file that a snapshot names is gone, or is another one: the run was resumed meanwhile. Its other tables may not
    fit any more; a new snapshot of the run can be read."""


class Pieces:
    """The pieces of one table, listed to be read at once: what becomes a part meanwhile is read as a part."""

    def __init__(self, run: Path, table: str) -> None:
        self.run = run
        self.waiting = journals(run)  # listed before the parts: what leaves the one has entered the other
        self.done: dict[str, Parts | DamagedError] = {table: parts(run, table)}
        self.inventory = inventory.read(run)  # after the files were listed: a resume shortens it before it moves any

    def read(self, name: str, schema: pa.Schema | None, table: Table | None) -> Iterator[pa.Table]:
        """Yields each part of ``name``, or its journal where the part does not stand yet. ``table``: None of metrics.

        Raises FileNotFoundError where a file has gone since it was listed.
        """
        done = self.done[name]
        if isinstance(done, DamagedError):
            raise done
        listed = self._listed(name, {*self.waiting, *done})
        for number in sorted({*self.waiting, *done}):
            footers = {entry.footer for entry in listed.get(number, ())}
            if number in done:
                yield self._part(done[number], schema, footers)
                continue
            records = self._records(number)
            if records is None:
                yield self._part(part_path(self.run, name, number), schema, ())
            elif records.table is not None:
                data = metrics_of if table is None else partial(table_of, table=table)
                found = data(records.table, run=self.run)
                yield found if schema is None else found.select(schema.names)

    def _part(self, path: Path, schema: pa.Schema | None, footers: Collection[int]) -> pa.Table:
        return read_part(self.run, path, schema, footers)

    def _records(self, number: int) -> Records | None:
        """Reads a journal; None where it has gone since it was listed, so that its part stands by now."""
        try:
            records = read_records(self.waiting[number])
        except FileNotFoundError:
            return None
        if (complaint := records.complaint()) and not is_locked(self.run):  # else it is being written
            tell(f"{self.waiting[number]}: {complaint}")
        return records

    def _still_lost(self, name: str, numbers: Collection[int]) -> list[int]:
        """Keeps of the parts that were not listed those that have not come since."""
        again = {*journals(self.run), *parts(self.run, name)}
        return [number for number in numbers if number not in again]

    def _listed(self, name: str, present: set[int]) -> dict[int, list[Entry]]:
        """Lists the parts that ``name`` must have; what is lost of them is said once."""
        listed = {} if self.inventory is None else self.inventory.of(name)
        lost = sorted(listed.keys() - present)
        lost = self._still_lost(name, lost) if lost else []
        advice = "restore it from a copy; the other steps are read"
        for number in lost[:1]:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            tell(f"{self.run}: part {number} of {name} ({listed[number][-1].steps()}){more} is missing: {advice}")
        if name == METRICS and (gaps := {*range(1, max(present, default=0))} - present - listed.keys()):
            tell(f"{self.run}: part {min(gaps)} of {name} is missing: {advice}")
        return listed


class HeldPieces(Pieces):
    """The pieces of all tables, listed to be read later, one table after the other, as they stand now.

    A closed journal becomes a part of each table and goes; the newest journal grows. Of a run that is ``alive`` the
    journals are therefore read now, and what was written after the newest of them is left out. Raises FileNotFoundError
    where files go while they are listed: then list them again.
    """

    def __init__(self, run: Path, tables: Iterable[str], alive: bool) -> None:
        self.run, self.waiting = run, journals(run)
        self._held: dict[int, Records] = {}
        for number, path in list(self.waiting.items()) if alive else ():
            try:
                self._held[number] = read_records(path)
            except FileNotFoundError:  # it has become parts, which are listed below
                del self.waiting[number]
        self.done = {METRICS: _parts(run, METRICS)}  # first: a part of metrics is written after those of all tables
        self.last = max(self._held, default=max({*self.waiting, *_numbers(self.done[METRICS])}, default=0))
        self.done |= {table: _parts(run, table) for table in tables}
        if alive:
            self.done = {name: self._until_now(found) for name, found in self.done.items()}
        self._identities = {path: _identity(path) for number, path in self.waiting.items() if number not in self._held}
        for found in self.done.values():
            self._identities |= {path: _identity(path) for path in _paths(found)}
        self.inventory = inventory.read(run)

    @property
    def settled(self) -> bool:
        """False where the parts are not those of the inventory, as while a resume moves some of them aside."""
        if self.inventory is None:
            return True
        for table, found in self.done.items():
            listed, present = self.inventory.of(table).keys(), _numbers(found) | self.waiting.keys()
            older = min(listed, default=0)  # parts of a run from before there was an inventory
            if any(n <= self.last for n in listed - present) or any(n > older for n in _numbers(found) - listed):
                return False
        return True

    def _until_now(self, found: Parts | DamagedError) -> Parts | DamagedError:
        if isinstance(found, DamagedError):
            return found
        return {number: path for number, path in found.items() if number <= self.last and number not in self._held}

    def _part(self, path: Path, schema: pa.Schema | None, footers: Collection[int]) -> pa.Table:
        self._check(path)
        try:
            return super()._part(path, schema, footers)
        except FileNotFoundError:
            raise self._replaced(path) from None

    def _records(self, number: int) -> Records:
        if number in self._held:
            return self._held[number]
        self._check(self.waiting[number])
        records = super()._records(number)
        if records is None:
            raise self._replaced(self.waiting[number])
        return records

    def _still_lost(self, name: str, numbers: Collection[int]) -> list[int]:
        return [number for number in numbers if number <= self.last]

    def _check(self, path: Path) -> None:
        try:
            same = _identity(path) == self._identities[path]
        except FileNotFoundError:
            same = False
        if not same:
            raise self._replaced(path)

    def _replaced(self, path: Path) -> ReplacedError:
        return ReplacedError(f"{path} was replaced while {self.run} was read: read the run again.", self.run)


def _parts(run: Path, table: str) -> Parts | DamagedError:
    try:
        return parts(run, table)
    except DamagedError as error:
        return error


def _numbers(found: Parts | DamagedError) -> set[int]:
    return set() if isinstance(found, DamagedError) else {*found}


def _paths(found: Parts | DamagedError) -> list[Path]:
    return [] if isinstance(found, DamagedError) else [*found.values()]


def _identity(path: Path) -> Identity:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
