"""The list of files that must exist, ``inventory.jsonl``: a line for each part with its rows, size and digests, one for
each journal that was begun, and one for each journal that was not read whole.

Each line names its run and ends in its own CRC. A part that was written again has several lines, and matches one of
them. Runs before schema 3 have no such file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from .files import appending, contents, inside, replace_file, sync_directory, write_all
from .identity import Identity
from .lines import document_in, line_of

FILE = "inventory.jsonl"
SINCE = 3  # the first schema with an inventory
LONGEST_LINE = 4096  # bytes; a line has some 300
WHOLE = re.compile(rb"} .{8}", re.DOTALL)  # the end of a line, even if its CRC is damaged
FOOTER = 8  # bytes at the end of a Parquet file: the footer's length, and PAR1


@dataclass(frozen=True)
class Entry:
    """A part as it was written. ``footer``: CRC of the Parquet footer, which no page checksum covers."""

    table: str
    part: int
    rows: int
    first: int
    last: int
    bytes: int
    sha256: str
    footer: int
    run: str = ""

    def steps(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


@dataclass(frozen=True)
class Inventory:
    """The content of an inventory: ``entries``, the parts by (table, number), with all entries of a part that was
    written again; ``begun``, the numbers of journals; ``left_out``, the number of records of a journal that did not get
    into its part.

    ``damaged``: lines whose CRC is wrong; ``foreign``: lines of another run.
    """

    entries: dict[tuple[str, int], list[Entry]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    left_out: dict[int, int] = field(default_factory=dict)
    damaged: int = 0
    foreign: int = 0

    def of(self, table: str) -> dict[int, list[Entry]]:
        return {part: entries for (name, part), entries in self.entries.items() if name == table}

    def complaints(self) -> list[str]:
        """Say which records did not get into parts, and how many lines are damaged or another run's."""
        words = [
            f"{count} records of journal {number} are not in its part: they were damaged, cut off or another run's"
            for number, count in sorted(self.left_out.items())
            if count
        ]
        for count, why in ((self.damaged, "are damaged"), (self.foreign, "belong to another run")):
            words += [f"{count} lines of {FILE} {why}, so that lost parts may not show"] * bool(count)
        return words

    def unread(self) -> set[int]:
        """Return the numbers of journals that have not become parts, so that the journals must exist."""
        return self.begun - {part for _, part in self.entries} - self.left_out.keys()

    def unlisted(self, table: str, present: Collection[int], identity: Identity) -> set[int]:
        """Return the numbers among the ``present`` parts of a table that this run should have listed and did not."""
        if not identity.run_id:
            return set()
        return {number for number in present if number >= identity.since and (table, number) not in self.entries}


def entry_of(table: str, part: int, steps: np.ndarray, data: memoryview, identity: Identity) -> Entry:
    told = len(steps), int(steps.min()), int(steps.max())
    return Entry(table, part, *told, len(data), sha256(data).hexdigest(), footer_crc(data), identity.run_id)


def footer_crc(data: memoryview) -> int:
    length = int.from_bytes(data[-FOOTER:-4], "little")
    return crc32(data[max(0, len(data) - FOOTER - length) :])


def footer_crc_of(path: Path) -> int:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - FOOTER))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - FOOTER - length))
        return crc32(file.read())


def add(run: Path, entries: Iterable[Entry]) -> None:
    """Append lines, all of them or none, and sync them to the disk. A torn last line from before is removed."""
    _append(run, "".join(line_of(asdict(entry)) for entry in entries), lasting=True)


def begin(run: Path, number: int, identity: Identity) -> None:
    """Note that a journal of that number exists, so that a lost journal is missed.

    Like the records of the journal, the line is not synced to the disk.
    """
    _append(run, _begun(number, identity), lasting=False)


def leave_out(run: Path, number: int, count: int, identity: Identity) -> None:
    """Note that ``count`` records of a journal could not be read, for readers of its parts."""
    _append(run, _left_out(number, count, identity), lasting=True)


def _append(run: Path, text: str, lasting: bool) -> None:
    with appending(run, FILE) as file:
        if not text:
            return
        size = os.fstat(file).st_size
        tail = os.pread(file, LONGEST_LINE, max(0, size - LONGEST_LINE)).rpartition(b"\n")[2]
        if _is_torn(tail):
            size -= len(tail)
            os.ftruncate(file, size)
            tail = b""
        try:
            write_all(file, ("\n" * bool(tail) + text).encode())
            if lasting:
                os.fsync(file)
        except BaseException:
            os.ftruncate(file, size)
            raise
        if lasting:
            sync_directory(run)


def keep_before(run: Path, part: int, before: Identity, identity: Identity) -> None:
    """Remove the entries from ``part`` on, which a resume moves aside next, and name the run ``identity`` in all lines.

    ``before``: the run's identity until now.
    """
    found = read(run, before)
    if found is None:
        return
    numbers = {number for _, number in found.entries} | found.begun | found.left_out.keys()
    if max(numbers, default=0) < part and before == identity:
        return
    kept = Inventory(
        {key: entries for key, entries in found.entries.items() if key[1] < part},
        {number for number in found.begun if number < part},
        {number: count for number, count in found.left_out.items() if number < part},
    )
    replace_file(inside(run, run / FILE), text_of(kept, identity).encode())


def text_of(found: Inventory, identity: Identity) -> str:
    """Return the text of the file for ``found``, with the run ``identity`` in every line."""
    entries = [replace(entry, run=identity.run_id) for several in found.entries.values() for entry in several]
    lines = [line_of(asdict(entry)) for entry in entries]
    lines += [_begun(number, identity) for number in sorted(found.begun)]
    lines += [_left_out(number, count, identity) for number, count in sorted(found.left_out.items())]
    return "".join(lines)


def read(run: Path, identity: Identity = Identity()) -> Inventory | None:
    """Read the inventory of a run; None if there is none."""
    try:
        lines = contents(run, run / FILE).split(b"\n")
    except FileNotFoundError:
        return None
    entries: dict[tuple[str, int], list[Entry]] = {}
    begun, left_out, damaged, foreign = set[int](), dict[int, int](), 0, 0
    if _is_torn(lines[-1]):
        lines.pop()
    for line in filter(None, lines):
        document = document_in(line)
        try:
            if document is not None and identity.run_id and document.get("run") != identity.run_id:
                foreign += 1
            elif document is None:
                damaged += 1
            elif "left_out" in document:
                number = int(document["journal"])
                left_out[number] = max(left_out.get(number, 0), int(document["left_out"]))
            elif "journal" in document:
                begun.add(int(document["journal"]))
            else:
                entry = Entry(**document)
                entries.setdefault((entry.table, entry.part), []).append(entry)
        except (OverflowError, TypeError, ValueError):
            damaged += 1
    return Inventory(entries, begun, left_out, damaged, foreign)


def _begun(number: int, identity: Identity) -> str:
    return line_of({"journal": number, "run": identity.run_id})


def _left_out(number: int, count: int, identity: Identity) -> str:
    return line_of({"journal": number, "left_out": count, "run": identity.run_id})


def _is_torn(tail: bytes) -> bool:
    """True for a line that a crash cut off. A torn line lists nothing and does not count as damage."""
    return bool(tail) and WHOLE.search(tail) is None
