"""What must be there: ``inventory.jsonl``, a line for each part with its rows, size and digests, added when it is made.

Each line ends in its own CRC. A part has several where it was made anew, and is one of them. Runs of before schema 3
have no such file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from .files import contents, inside, replace_file, sync_directory, write_all, writing

FILE = "inventory.jsonl"
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

    def steps(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


@dataclass(frozen=True)
class Inventory:
    """What was written, by (table, number), all of it of a part that was made anew; ``damaged``: lines that are another
    than was written."""

    entries: dict[tuple[str, int], list[Entry]]
    damaged: int = 0

    def of(self, table: str) -> dict[int, list[Entry]]:
        return {part: entries for (name, part), entries in self.entries.items() if name == table}


def entry_of(table: str, part: int, steps: np.ndarray, data: memoryview) -> Entry:
    told = len(steps), int(steps.min()), int(steps.max())
    return Entry(table, part, *told, len(data), sha256(data).hexdigest(), footer_crc(data))


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
    """Append lines, all of them on the disk or none; a torn line of before is ended first."""
    text = text_of(entries)
    path = inside(run, run / FILE)
    with writing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            size = os.fstat(file).st_size
            if not text:
                return
            torn = size and os.pread(file, 1, size - 1) != b"\n"
            try:
                write_all(file, ("\n" * bool(torn) + text).encode())
                os.fsync(file)
            except BaseException:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)
        sync_directory(run)


def text_of(entries: Iterable[Entry]) -> str:
    """Writes the lines of a whole inventory, for a copy of a run that has other parts."""
    return "".join(map(_line, entries))


def keep_before(run: Path, part: int) -> None:
    """Forget the parts from ``part`` on: a resume moves them aside next."""
    found = read(run)
    if found is not None and any(number >= part for _, number in found.entries):
        kept = [entry for (_, number), entries in found.entries.items() if number < part for entry in entries]
        replace_file(inside(run, run / FILE), text_of(kept).encode())


def read(run: Path) -> Inventory | None:
    """Reads the inventory of a run; None where there is none."""
    try:
        lines = contents(run, run / FILE).split(b"\n")
    except FileNotFoundError:
        return None
    entries: dict[tuple[str, int], list[Entry]] = {}
    damaged = 0
    for line in filter(None, lines):
        if (entry := _read_line(line)) is None:
            damaged += 1
        else:
            entries.setdefault((entry.table, entry.part), []).append(entry)
    return Inventory(entries, damaged)


def _line(entry: Entry) -> str:
    text = json.dumps(asdict(entry))
    return f"{text} {crc32(text.encode()):08x}\n"


def _read_line(line: bytes) -> Entry | None:
    text, _, crc = line.rpartition(b" ")
    if crc != b"%08x" % crc32(text):
        return None
    try:
        return Entry(**json.loads(text))
    except (TypeError, ValueError):
        return None
