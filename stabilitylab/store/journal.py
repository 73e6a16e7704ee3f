"""The journal: one self-contained Arrow record a step, raw float64, so that a step is wholly there or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..schema import Cells, Table
from .arrays import flags, floats, integers, strings
from .files import write_all, writing

FLOATS = pa.list_(pa.float64())
FLAGS = pa.list_(pa.bool_())
ABSENT = ":absent"  # suffix of a table's second column


class Journal:
    """An Arrow IPC stream to which each step is added by one unbuffered write: kill -9 takes nothing back."""

    def __init__(self, path: Path, tables: Sequence[Table]) -> None:
        self.path, self._tables, self.size = path, tables, 0
        fields = [pa.field("step", pa.int64()), pa.field("metrics", pa.map_(pa.string(), pa.float64()))]
        for table in tables:
            fields += [pa.field(table.name, FLOATS), pa.field(table.name + ABSENT, FLAGS)]
        self._schema = pa.schema(fields)
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def append(self, step: int, metrics: Mapping[str, float | None], cells: Mapping[str, Cells]) -> None:
        columns = [integers([step], pa.int64()), _metrics(metrics)]
        for table in self._tables:
            columns += _cells(table, cells[table.name]) if table.name in cells else [_MISSING[FLOATS], _MISSING[FLAGS]]
        record = pa.RecordBatch.from_arrays(columns, schema=self._schema).serialize()
        data = record if self.size else pa.py_buffer(b"".join((self._schema.serialize(), record)))
        with writing(self.path):
            try:
                write_all(self._descriptor, data)
            except BaseException:
                os.ftruncate(self._descriptor, self.size)  # a torn record would hide all that follow it
                raise
        self.size += data.size

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(path: Path) -> pa.Table | None:
    """The whole records of a journal, one row a step; a torn tail is left out, None where no record is whole."""
    data = path.read_bytes()
    records = []
    try:
        with pa.ipc.open_stream(pa.BufferReader(data)) as stream:
            for record in stream:
                record.validate()
                records.append(record)
    except (pa.ArrowException, OSError):
        pass
    return pa.Table.from_batches(records).combine_chunks() if records else None


def _one_list(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(integers([0, len(values)], pa.int32()), values)


def _cells(table: Table, cells: Cells) -> list[pa.Array]:
    values, absent = np.asarray(cells.values, np.float64), np.asarray(cells.absent, bool)
    if values.shape != (len(table.rows), len(table.columns)) or absent.shape != (len(table.rows),):
        raise ValueError(
            f"table {table.name!r} has {len(table.rows)} rows and {len(table.columns)} columns; "
            f"got values {values.shape}, absent {absent.shape}"
        )
    return [_one_list(floats(values.ravel())), _one_list(flags(absent))]


def _metrics(metrics: Mapping[str, float | None]) -> pa.Array:
    values = np.array([0.0 if value is None else float(value) for value in metrics.values()], np.float64)
    items = floats(values, np.array([value is not None for value in metrics.values()], bool))
    return pa.MapArray.from_arrays(integers([0, len(metrics)], pa.int32()), strings(list(metrics)), items)


_MISSING = {kind: pa.nulls(1, kind) for kind in (FLOATS, FLAGS)}
