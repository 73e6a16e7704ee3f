"""The journal: a self-contained, checked record a step, raw float64, so that a step is wholly there or not at all.

A record is a head (mark, its number in the journal, length and CRC of what follows, CRC of the head) and the names of
its tables before one Arrow record batch. What is damaged costs itself alone: the next mark begins the next record.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from ..schema import Cells, Table
from .arrays import flags, floats, integers, strings
from .files import write_all, writing

FLOATS = pa.list_(pa.float64())
FLAGS = pa.list_(pa.bool_())
ABSENT = ":absent"  # suffix of a table's second column
MARK = b"\x93slab\r\n\x1a"  # as in PNG: neither text nor what a transfer as text leaves alone
HEAD = struct.Struct("<8sIIII")


class Journal:
    """A file to which each step is added by one unbuffered write: kill -9 takes nothing back."""

    def __init__(self, path: Path, tables: Sequence[Table]) -> None:
        self.path, self._tables, self.size, self._count = path, tables, 0, 0
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def append(self, step: int, metrics: Mapping[str, float | None], cells: Mapping[str, Cells]) -> None:
        columns = [integers([step], pa.int64()), _metrics(metrics)]
        present = [table for table in self._tables if table.name in cells]
        for table in present:
            columns += _cells(table, cells[table.name])
        names = tuple(table.name for table in present)
        batch = pa.RecordBatch.from_arrays(columns, schema=_schema(names)).serialize()
        data = _framed(self._count, names, batch)
        with writing(self.path):
            try:
                write_all(self._descriptor, data)
            except BaseException:
                os.ftruncate(self._descriptor, self.size)  # a full disk wants its space back
                raise
        self.size += len(data)
        self._count += 1

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Records(NamedTuple):
    """The whole records of a journal, in order, as one table (a table's cells null where a record has none of them);
    how many were damaged; and whether it ends in a torn one."""

    table: pa.Table | None
    dropped: int = 0
    torn: bool = False

    def complaint(self) -> str:
        """Says what is wrong with the journal, "" if nothing is."""
        words = [f"{self.dropped} damaged record{'s were' if self.dropped > 1 else ' was'} left out"] * (
            self.dropped > 0
        )
        words += ["the torn record at its end was left out"] * self.torn
        return "; ".join(words)


def read_records(path: Path) -> Records:
    """What a journal holds; a stream of Arrow batches, as schema 2 had it, is read too."""
    data = path.read_bytes()
    if data[:4] == b"\xff\xff\xff\xff":
        return _older(data)
    found: dict[tuple[str, ...], list[tuple[int, pa.RecordBatch]]] = {}
    last, whole, end = -1, 0, 0
    for number, payload, reached in _frames(data):
        last, end = max(last, number), reached
        if (read := _unframed(payload)) is not None:
            found.setdefault(read[0], []).append((number, read[1]))
            whole += 1
    torn = end < len(data)
    if not whole:
        return Records(None, last + 1, torn)
    groups = [pa.Table.from_batches([batch for _, batch in group]).combine_chunks() for group in found.values()]
    table = pa.concat_tables(groups, promote_options="default").combine_chunks()
    if len(groups) > 1:
        table = table.take(pa.array(np.argsort([number for group in found.values() for number, _ in group])))
    return Records(table, last + 1 - whole, torn)


def _framed(number: int, names: Sequence[str], batch: pa.Buffer) -> bytes:
    told = ",".join(names).encode()
    told = struct.pack("<I", len(told)) + told
    payload = b"".join((told, bytes(-len(told) % 8), batch))  # Arrow wants its buffers aligned
    head = HEAD.pack(MARK, number, len(payload), crc32(payload), 0)[:-4]
    return b"".join((head, struct.pack("<I", crc32(head)), payload))


def _frames(data: bytes) -> Iterator[tuple[int, bytes | None, int]]:
    """Yields (number, payload, end) of each record whose head is whole; no payload where its CRC is another."""
    place = data.find(MARK)
    while 0 <= place <= len(data) - HEAD.size:
        _, number, length, payload_crc, head_crc = HEAD.unpack_from(data, place)
        start = place + HEAD.size
        if crc32(data[place : start - 4]) != head_crc:
            place = data.find(MARK, place + 1)
            continue
        end = start + length
        if end > len(data):
            break  # torn
        payload = data[start:end]
        yield number, payload if crc32(payload) == payload_crc else None, end
        place = data.find(MARK, end)


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
    except (struct.error, UnicodeDecodeError, pa.ArrowException, OSError):  # a record of somebody's making
        return None
    return names, batch


def _older(data: bytes) -> Records:
    """Reads a stream of schema 2: without checksums, up to the first record that is not whole."""
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
