"""The journal: self-contained records with checksums, in raw float64. A record is read whole or not at all.

A step has one record, or two if its first part was recorded early.

A record is a head (mark, id of the run, number of the journal, its number in the journal, length and CRC of the
payload, CRC of the head) and a payload: the names of its tables and one Arrow record batch. A damaged record costs only
itself: the next mark begins the next record. A record of another run or of another journal is not read.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from ..schema import Cells, Table
from .arrays import flags, floats, integers, strings
from .files import HeldFile, inode, write_all, writing
from .identity import Identity

FLOATS = pa.list_(pa.float64())
FLAGS = pa.list_(pa.bool_())
ABSENT = ":absent"  # suffix of a table's second column
MARK = b"\x93sla4\r\n\x1a"  # as in PNG: it is not text, and a transfer as text changes it
HEAD = struct.Struct("<8s16sIIIII")
OLD_MARK, OLD_HEAD = b"\x93slab\r\n\x1a", struct.Struct("<8sIIII")  # of schema 3: without run and journal
MARKS = re.compile(b"|".join(map(re.escape, (MARK, OLD_MARK))))


class Journal(HeldFile):
    """A file to which each step is added by one unbuffered write, which survives kill -9."""

    def __init__(self, path: Path, tables: Sequence[Table], identity: Identity = Identity(), number: int = 0) -> None:
        self.path, self._tables, self.size, self.count = path, tables, 0, 0
        self._identity, self._number = identity, number
        with writing(path):
            super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666))
            self._file = inode(path)

    @property
    def descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} was closed")
        return self._descriptor

    def append(self, step: int, metrics: Mapping[str, float | None], cells: Mapping[str, Cells]) -> None:
        columns = [integers([step], pa.int64()), _metrics(metrics)]
        present = [table for table in self._tables if table.name in cells]
        for table in present:
            columns += _cells(table, cells[table.name])
        names = tuple(table.name for table in present)
        batch = pa.RecordBatch.from_arrays(columns, schema=_schema(names)).serialize()
        data = _framed(self._identity, self._number, self.count, names, batch)
        with writing(self.path):
            try:
                write_all(self.descriptor, data)
            except BaseException:
                os.ftruncate(self.descriptor, self.size)  # a full disk wants its space back
                raise
        self.size += len(data)
        self.count += 1

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self.descriptor)

    def is_elsewhere(self) -> bool:
        """True if the path no longer leads to the file that was begun."""
        return inode(self.path) != self._file

    def changed(self) -> str:
        """Say how another process changed the file since the last append; "" if it did not."""
        if self.is_elsewhere():
            return "was replaced by another file" if os.path.lexists(self.path) else "was removed"
        size = os.fstat(self.descriptor).st_size
        return "" if size == self.size else f"was changed from {self.size:,} to {size:,} bytes"

    def held(self) -> bytes:
        """Return the content of the open file, also if the file has no name any more."""
        with writing(self.path):
            return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)

    def reopen(self) -> None:
        """Continue in the file that is at the path now."""
        with writing(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
            self.release()
            super().__init__(descriptor)
            self._file = inode(self.path)
            self.size = os.fstat(descriptor).st_size


class Records(NamedTuple):
    """The whole records of a journal, in order, as one table (the cells of a table are null in a record without it).

    ``dropped``: the number of damaged records. ``torn``: True if the journal ends in a torn record. ``foreign``: the
    number of records of another run or journal, and of repeated records.
    """

    table: pa.Table | None
    dropped: int = 0
    torn: bool = False
    foreign: int = 0

    def complaint(self) -> str:
        """Say what is wrong with the journal; "" if nothing is."""
        words = [f"{self.dropped} damaged record{'s were' if self.dropped > 1 else ' was'} left out"] * (
            self.dropped > 0
        )
        words += [
            f"{self.foreign} record{'s' * (self.foreign > 1)} of another run or journal "
            f"{'were' if self.foreign > 1 else 'was'} left out"
        ] * (self.foreign > 0)
        words += ["the torn record at its end was left out"] * self.torn
        return "; ".join(words)

    @property
    def left_out(self) -> int:
        return self.dropped + self.foreign


class _Frame(NamedTuple):
    """A record whose head is whole. ``run``: None in schema 3. ``payload``: None if its CRC is wrong."""

    run: str | None
    journal: int
    number: int
    payload: bytes | None
    end: int


def read_records(path: Path, identity: Identity = Identity(), journal: int = 0) -> Records:
    """Read the records of the run ``identity`` from the journal of that number; all records if the identity has no id.

    A stream of Arrow batches, as in schema 2, is read too.
    """
    data = path.read_bytes()
    if data[:4] == b"\xff\xff\xff\xff":
        return _older(data) if identity.owns(None, journal) else Records(None, foreign=1)
    found: dict[tuple[str, ...], list[tuple[int, pa.RecordBatch]]] = {}
    seen: set[int] = set()
    last, whole, foreign, end = -1, 0, 0, 0
    for frame in _frames(data):
        end = frame.end
        misplaced = bool(identity.run_id) and frame.run is not None and frame.journal != journal
        if misplaced or not identity.owns(frame.run, journal) or frame.number in seen:
            foreign += 1
            continue
        last = max(last, frame.number)
        if (read := _unframed(frame.payload)) is not None:
            seen.add(frame.number)
            found.setdefault(read[0], []).append((frame.number, read[1]))
            whole += 1
    torn = end < len(data)
    if not whole:
        return Records(None, last + 1, torn, foreign)
    groups = [pa.Table.from_batches([batch for _, batch in group]).combine_chunks() for group in found.values()]
    table = pa.concat_tables(groups, promote_options="default").combine_chunks()
    order = np.array([number for group in found.values() for number, _ in group])
    if (np.diff(order) < 0).any():
        table = table.take(integers(np.argsort(order), pa.int64()))
    return Records(table, last + 1 - whole, torn, foreign)


def _framed(identity: Identity, journal: int, number: int, names: Sequence[str], batch: pa.Buffer) -> bytes:
    told = ",".join(names).encode()
    told = struct.pack("<I", len(told)) + told
    payload = b"".join((told, bytes(-len(told) % 8), batch))  # Arrow wants its buffers aligned
    run = bytes.fromhex(identity.run_id)
    head = HEAD.pack(MARK, run, journal, number, len(payload), crc32(payload), 0)[:-4]
    return b"".join((head, struct.pack("<I", crc32(head)), payload))


def _frames(data: bytes) -> Iterator[_Frame]:
    """Yield each record whose head is whole. After a damaged payload the next record may begin inside it, since a file
    that was cut during a write continues there."""
    place = _next_mark(data, 0)
    while place >= 0:
        layout = HEAD if data.startswith(MARK, place) else OLD_HEAD
        start = place + layout.size
        if start > len(data) or crc32(data[place : start - 4]) != int.from_bytes(data[start - 4 : start], "little"):
            place = _next_mark(data, place + 1)
            continue
        run, journal = None, 0
        if layout is HEAD:
            _, raw, journal, number, length, payload_crc, _ = HEAD.unpack_from(data, place)
            run = raw.hex()
        else:
            _, number, length, payload_crc, _ = OLD_HEAD.unpack_from(data, place)
        end = start + length
        payload = data[start:end]
        if len(payload) < length:  # torn, or cut while it was written
            place = _next_mark(data, start)
            continue
        whole = crc32(payload) == payload_crc
        yield _Frame(run, journal, number, payload if whole else None, end)
        place = _next_mark(data, end if whole else start)


def _next_mark(data: bytes, place: int) -> int:
    found = MARKS.search(data, place)
    return -1 if found is None else found.start()


def _unframed(payload: bytes | None) -> tuple[tuple[str, ...], pa.RecordBatch] | None:
    if payload is None:
        return None
    try:
        (length,) = struct.unpack_from("<I", payload)
        told = payload[4 : 4 + length].decode()
        names = tuple(told.split(",")) if told else ()
        message = pa.py_buffer(payload)[4 + length + -(4 + length) % 8 :]
        batch = pa.ipc.read_record_batch(message, _schema(names))
        batch.validate(full=True)
    except (struct.error, UnicodeDecodeError, pa.ArrowException, OSError):  # a record of another writer
        return None
    return names, batch


def _older(data: bytes) -> Records:
    """Read a stream of schema 2, which has no checksums, up to the first record that is not whole."""
    records, torn = [], False
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as stream:
            for record in stream:
                record.validate(full=True)
                records.append(record)
    except (pa.ArrowException, OSError):
        torn = True
    return Records(pa.Table.from_batches(records).combine_chunks() if records else None, 0, torn)


def _schema(names: tuple[str, ...]) -> pa.Schema:
    fields = [pa.field("step", pa.int64()), pa.field("metrics", pa.map_(pa.string(), pa.float64()))]
    for name in names:
        fields += [pa.field(name, FLOATS), pa.field(name + ABSENT, FLAGS)]
    return pa.schema(fields)


def _one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(integers([0, len(values)], pa.int32()), values)


def _cells(table: Table, cells: Cells) -> list[pa.Array]:
    values, absent = np.asarray(cells.values, np.float64), np.asarray(cells.absent, bool)
    missing = None if cells.missing is None else np.asarray(cells.missing, bool)
    given = values.shape if missing is None else missing.shape
    if (values.shape, absent.shape, given) != ((shape := (len(table.rows), len(table.columns))), shape[:1], shape):
        raise ValueError(
            f"table {table.name!r} has {len(table.rows)} rows and {len(table.columns)} columns; "
            f"got values {values.shape}, absent {absent.shape}"
        )
    valid = None if missing is None or not missing.any() else ~missing.ravel()
    return [_one_list(floats(values.ravel(), valid)), _one_list(flags(absent))]


def _metrics(metrics: Mapping[str, float | None]) -> pa.Array:
    values = np.array([0.0 if value is None else float(value) for value in metrics.values()], np.float64)
    items = floats(values, np.array([value is not None for value in metrics.values()], bool))
    return pa.MapArray.from_arrays(integers([0, len(metrics)], pa.int32()), strings(list(metrics)), items)
