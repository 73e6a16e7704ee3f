"""Parts: the journal's records as tidy Parquet files that pandas reads without us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import InputError
from ..schema import Table
from .arrays import flags, floats, integers, strings
from .files import replace_file
from .journal import ABSENT, read_records
from .layout import METRICS, part_path, parts
from .names import found_as

LABELS = {"site": "site", "stack_name": "stack", "sublayer": "sublayer"}  # column -> what it is called in a Row


def part_schema(table: Table) -> pa.Schema:
    """step, site, stack_name, layer, sublayer, the value columns, absent."""
    text = pa.dictionary(pa.int32(), pa.string())
    places = [("step", pa.int64()), ("site", text), ("stack_name", text), ("layer", pa.int32()), ("sublayer", text)]
    return pa.schema([*places, *((name, pa.float64()) for name in table.columns), ("absent", pa.bool_())])


def encode(labels: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """(codes, categories) of a label of a table's rows."""
    categories = list(dict.fromkeys(labels))
    index = {category: code for code, category in enumerate(categories)}
    return np.array([index[label] for label in labels], np.int32), categories


def table_of(records: pa.Table, table: Table) -> pa.Table:
    """A table's rows out of journal records: only here do sites join the numbers. Where absent, values are null."""
    if table.name not in records.column_names:  # the journal is older than the table
        return part_schema(table).empty_table()
    recorded = records.select(["step", table.name, table.name + ABSENT]).filter(records[table.name].is_valid())
    steps, rows, width = recorded.num_rows, len(table.rows), len(table.columns)
    values = recorded[1].combine_chunks().flatten().to_numpy()
    if len(values) != steps * rows * width:
        raise InputError(f"a journal does not fit run.json's table {table.name!r}: restore run.json from a copy.")
    absent = recorded[2].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return tidy(table, recorded[0].to_numpy(), values.reshape(steps * rows, width), absent)


def tidy(table: Table, steps: np.ndarray | Sequence[int], values: np.ndarray, absent: np.ndarray) -> pa.Table:
    """``values`` (steps * rows, columns) with the places that they belong to."""
    count, rows = len(steps), len(table.rows)
    columns = {"step": integers(np.repeat(steps, rows), pa.int64())}
    for name, label in LABELS.items():
        codes, categories = encode([getattr(row, label) for row in table.rows])
        indices = integers(np.tile(codes, count), pa.int32())
        columns[name] = pa.DictionaryArray.from_arrays(indices, strings(categories))
    columns["layer"] = integers(np.tile([row.layer for row in table.rows], count), pa.int32())
    columns |= {name: floats(values[:, index], ~absent) for index, name in enumerate(table.columns)}
    columns["absent"] = flags(absent)
    schema = part_schema(table)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def metrics_of(records: pa.Table) -> pa.Table:
    """One row a step, one float64 column a metric in order of first appearance; null where not given."""
    column = records["metrics"].combine_chunks()
    count = len(column)
    owner = np.repeat(np.arange(count), np.diff(column.offsets.to_numpy()))
    keys = column.keys.dictionary_encode()
    which = keys.indices.to_numpy()
    given, items = column.items.is_valid().to_numpy(zero_copy_only=False), column.items.to_numpy(zero_copy_only=False)
    columns = {"step": records["step"].combine_chunks()}
    for code, name in enumerate(keys.dictionary.to_pylist()):
        chosen = which == code
        values, valid = np.zeros(count), np.zeros(count, bool)
        values[owner[chosen]], valid[owner[chosen]] = items[chosen], given[chosen]
        columns[name] = floats(values, valid)
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def compact(run: Path, number: int, journal: Path, tables: Mapping[str, Table]) -> None:
    """Journal ``number`` as one part of each table that it holds. May be repeated: it writes the same files again."""
    records = read_records(journal)
    if records is None:
        return
    for table in tables.values():
        data = table_of(records, table)
        if data.num_rows:
            write_parquet(part_path(run, table.name, number), data)
    metrics = metrics_of(records)
    _widen_first(run, metrics.schema)
    write_parquet(part_path(run, METRICS, number), metrics)


def _widen_first(run: Path, schema: pa.Schema) -> None:
    """Give the first metrics part every column of ``schema``: pandas takes a folder's columns from its first file.

    Rewriting one small file when a column first appears is cheaper than a schema fixed beforehand, and the later
    parts need nothing: where a file lacks a column, pandas and Arrow fill in nulls.
    """
    present = parts(run, METRICS)
    if not present:
        return
    first = present[min(present)]
    data = read_part(first, None)
    new = [field for field in schema if field.name not in data.column_names]
    for field in new:
        data = data.append_column(field, pa.nulls(data.num_rows, field.type))
    if new:
        write_parquet(first, data)


def read_part(path: Path, schema: pa.Schema | None) -> pa.Table:
    """The columns of ``schema`` (None: all) of one part, each under its old name where it has that alone."""
    with _part(path) as file:
        if schema is None:
            return file.read(use_threads=False)
        names = [found_as(name, file.schema_arrow.names) for name in schema.names]
        return file.read(columns=names, use_threads=False).select(names).rename_columns(schema.names).cast(schema)


def renew(run: Path, table: Table) -> None:
    """Give parts of an earlier version today's names of columns: pandas takes those of a folder from its first file."""
    schema = part_schema(table)
    for path in parts(run, table.name).values():
        with _part(path) as file:
            present = file.schema_arrow.names
        if any(found_as(name, present) != name for name in schema.names):
            write_parquet(path, read_part(path, schema))


@contextmanager
def _part(path: Path) -> Iterator[pq.ParquetFile]:
    """Anything that is no part of the run is refused in one sentence."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{path} is damaged or not part of the run ({reason.rstrip('.')}): restore it from a copy, or move it away "
            "to read the other steps."
        ) from error


def write_parquet(path: Path, data: pa.Table) -> None:
    """Whole or not at all."""
    sink = pa.BufferOutputStream()
    values = [field.name for field in data.schema if field.type == pa.float64()]
    labels = [name for name in data.column_names if name not in (*values, "absent")]
    options: dict[str, Any] = {  # 1.2 to 1.8 times smaller than the defaults, and read as fast
        "compression": "zstd",
        "use_dictionary": labels,
        "column_encoding": dict.fromkeys(values, "BYTE_STREAM_SPLIT"),
    }
    pq.write_table(data, sink, **options)
    replace_file(path, sink.getvalue())
