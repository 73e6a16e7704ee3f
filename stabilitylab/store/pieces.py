"""The pieces of a run's tables: its parts, and the journals that are not parts yet."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa

from ..errors import DamagedError
from ..schema import Table
from . import inventory
from .damage import tell
from .files import is_locked
from .identity import Identity
from .inventory import Entry, Inventory
from .journal import Records, read_records
from .layout import METRICS, journal_path, journals, part_path, parts
from .parts import metrics_of, read_part, table_of

Parts = Mapping[int, Path]
Stamp = tuple[int, int, int]  # inode, size and time of the last change: a file that was replaced has another stamp


class ReplacedError(DamagedError):
    """A file of a snapshot is missing or was replaced: the run was resumed meanwhile. The other tables of the snapshot
    may not fit any more; take a new snapshot."""


class Pieces:
    """The pieces of one table, listed to be read at once. A journal that becomes a part meanwhile is read as a part.

    ``schema``: the schema version of run.json, which decides if there must be an inventory.
    """

    def __init__(self, run: Path, table: str, identity: Identity, schema: int) -> None:
        self.run, self.identity, self.schema = run, identity, schema
        self.waiting = journals(run)  # listed before the parts: a journal that has gone since has become parts
        self.done: dict[str, Parts | DamagedError] = {table: parts(run, table)}
        self.stamps = stamps_of(_paths(self.done[table]))
        # read after the files were listed: a resume shortens the inventory before it moves any file
        self.inventory = inventory.read(run, identity)

    def read(self, name: str, schema: pa.Schema | None, table: Table | None) -> Iterator[pa.Table]:
        """Yield each part of ``name``, or its journal if the part does not exist yet. ``table``: None for metrics.

        Raises FileNotFoundError if a file has gone, or a part was written again, since it was listed.
        """
        done = self.done[name]
        if isinstance(done, DamagedError):
            raise done
        listed = self._listed(name, done)
        for number in sorted({*self.waiting, *done}):
            if number in done:
                yield self._part(done[number], schema, listed.get(number, ()))
                continue
            records = self._records(number)
            if records is None:
                yield self._part(part_path(self.run, name, number), schema, ())
            elif records.table is not None:
                data = metrics_of if table is None else partial(table_of, table=table)
                found = data(records.table, run=self.run)
                yield found if schema is None else found.select(schema.names)

    def _part(self, path: Path, schema: pa.Schema | None, entries: Sequence[Entry]) -> pa.Table:
        try:
            return read_part(self.run, path, schema, self.identity, entries)
        except DamagedError:  # or written again, with a new column, after the inventory was read
            if path in self.stamps and _stamp(path) != self.stamps[path]:
                raise FileNotFoundError(path) from None
            raise

    def _records(self, number: int) -> Records | None:
        """Read a journal; None if it has gone since it was listed, so that its part exists by now."""
        try:
            records = read_records(self.waiting[number], self.identity, number)
        except FileNotFoundError:
            return None
        self._complain(number, records)
        return records

    def _complain(self, number: int, records: Records) -> None:
        # a live writer may be amid its last record
        if (complaint := records.complaint()) and (records.left_out or not is_locked(self.run)):
            tell(f"{self.waiting[number]}: {complaint}")

    def _still_lost(self, name: str, numbers: Collection[int]) -> list[int]:
        """Return the numbers of parts and journals that are still missing now."""
        again = {*journals(self.run), *parts(self.run, name)}
        return [number for number in sorted(numbers) if number not in again]

    def _still_there(self, name: str, numbers: Collection[int]) -> list[int]:
        """Return the numbers of parts that still exist, which no resume has moved since."""
        again = parts(self.run, name)
        return [number for number in sorted(numbers) if number in again]

    def _listed(self, name: str, done: Parts) -> dict[int, list[Entry]]:
        """Return the entries of the parts that ``name`` must have. Missing parts, and doubts about the inventory, are
        reported once."""
        found, present = self.inventory, {*self.waiting, *done}
        if found is None and self.schema >= inventory.SINCE:
            tell(f"{self.run}: {inventory.FILE} is missing, so that lost parts would not show")
        listed = {} if found is None else found.of(name)
        lost = listed.keys() - present
        lost = self._still_lost(name, lost) if lost else []
        advice = "restore it from a copy; the other steps are read"
        for number in lost[:1]:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            tell(f"{self.run}: part {number} of {name} ({listed[number][-1].steps()}){more} is missing: {advice}")
        empty: set[int] = set() if found is None else {*found.left_out}
        gaps = {*range(1, max(present, default=0))} - present - listed.keys() - empty
        if name == METRICS and gaps:
            tell(f"{self.run}: part {min(gaps)} of {name} is missing: {advice}")
        if found is not None:
            for sentence in self._doubts(found, name, done):
                tell(f"{self.run}: {sentence}")
        return listed

    def _doubts(self, found: Inventory, name: str, done: Parts) -> Iterator[str]:
        """Yield sentences about lost records in the inventory, and about reasons to doubt it."""
        lost = found.unread() - self.waiting.keys() - done.keys()
        if lost := self._still_lost(METRICS, lost) if lost else []:
            missing = journal_path(self.run, lost[0]).name
            yield f"{missing} is missing, with rows that no part holds: restore it; the other steps are read"
        yield from found.complaints()
        unlisted = found.unlisted(name, done.keys(), self.identity)
        if unlisted := self._still_there(name, unlisted) if unlisted else []:
            yield f"{inventory.FILE} does not list part {unlisted[0]} of {name}, so that lost parts may not show"


class HeldPieces(Pieces):
    """The pieces of all tables, listed to be read later, one table after the other, as they are now.

    A closed journal becomes a part of each table and is removed; the newest journal grows. If the run is ``alive``, the
    journals are therefore read now, and everything written after the newest of them is left out. ``stamps``: the files
    of the tables, each with its inode, size and time of the last change. Raises FileNotFoundError if files go while
    they are listed: then list them again.
    """

    def __init__(self, run: Path, tables: Iterable[str], identity: Identity, schema: int, alive: bool) -> None:
        self.run, self.identity, self.schema = run, identity, schema
        self.waiting = journals(run)
        self._held: dict[int, Records] = {}
        for number, path in list(self.waiting.items()) if alive else ():
            try:
                self._held[number] = read_records(path, identity, number)
            except FileNotFoundError:  # the journal has become parts, which are listed below
                del self.waiting[number]
        self.done = {METRICS: _parts(run, METRICS)}  # first: a part of metrics is written after those of all tables
        self.last = max(self._held, default=max({*self.waiting, *_numbers(self.done[METRICS])}, default=0))
        self.done |= {table: _parts(run, table) for table in tables}
        if alive:
            self.done = {name: self._until_now(found) for name, found in self.done.items()}
        self.stamps = {path: _stamp(path) for number, path in self.waiting.items() if number not in self._held}
        for found in self.done.values():
            self.stamps |= {path: _stamp(path) for path in _paths(found)}
        self.inventory = inventory.read(run, identity)

    @property
    def settled(self) -> bool:
        """False if the parts are not those of the inventory, as while a resume moves some of them aside."""
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

    def _part(self, path: Path, schema: pa.Schema | None, entries: Sequence[Entry]) -> pa.Table:
        self._check(path)
        try:
            return super()._part(path, schema, entries)
        except FileNotFoundError:
            raise self._replaced(path) from None

    def _records(self, number: int) -> Records:
        if number in self._held:
            self._complain(number, self._held[number])
            return self._held[number]
        self._check(self.waiting[number])
        records = super()._records(number)
        if records is None:
            raise self._replaced(self.waiting[number])
        return records

    def _still_lost(self, name: str, numbers: Collection[int]) -> list[int]:
        return [number for number in sorted(numbers) if number <= self.last]

    def _still_there(self, name: str, numbers: Collection[int]) -> list[int]:
        return sorted(numbers)

    def _check(self, path: Path) -> None:
        try:
            same = _stamp(path) == self.stamps[path]
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


def stamps_of(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """Return inode, size and time of the last change of files; those that are missing are left out."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = _stamp(path)
    return found


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
