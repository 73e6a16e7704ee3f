"""Turns the journal's records into parts: tidy Parquet files that pandas reads without us."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DamagedError, first_line
from ..schema import Table
from . import inventory
from .arrays import flags, floats, integers, numbers, strings
from .files import LARGEST, inside, replace_file
from .identity import Identity
from .inventory import Entry, entry_of, footer_crc_of
from .journal import ABSENT, Records, read_records
from .layout import METRICS, is_name, number_of, part_path, parts
from .names import found_as

MOST_CELLS = 10**8  # rows x columns of a part that is read; a full journal of the narrowest table makes 3 * 10**7
OWN = b"stabilitylab"  # key of a part's own entry in its footer: the run, the table and the number that it belongs to
LABELS = {"site": "site", "stack_name": "stack", "sublayer": "sublayer"}  # column -> what it is called in a Row


def part_schema(table: Table) -> pa.Schema:
    """Return the columns of a part: step, site, stack_name, layer, sublayer, the value columns, absent."""
    text = pa.dictionary(pa.int32(), pa.string())
    places = [("step", pa.int64()), ("site", text), ("stack_name", text), ("layer", pa.int32()), ("sublayer", text)]
    return pa.schema([*places, *((name, pa.float64()) for name in table.columns), ("absent", pa.bool_())])


def encode(labels: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Encode a label of a table's rows as (codes, categories)."""
    categories = list(dict.fromkeys(labels))
    index = {category: code for code, category in enumerate(categories)}
    return np.array([index[label] for label in labels], np.int32), categories


def table_of(records: pa.Table, table: Table, run: Path) -> pa.Table:
    """Make a table's rows from journal records, which hold no sites: the sites come from run.json. Absent values are
    null."""
    if table.name not in records.column_names:  # the journal is older than the table
        return pa.Table.from_batches([], part_schema(table))
    recorded = records.select(["step", table.name, table.name + ABSENT]).filter(records[table.name].is_valid())
    steps, rows, width = recorded.num_rows, len(table.rows), len(table.columns)
    values, absent = (recorded[place].combine_chunks().flatten() for place in (1, 2))
    if len(values) != steps * rows * width or len(absent) != steps * rows:
        told = f"a journal of {run} does not fit run.json's table {table.name!r}: restore run.json from a copy."
        raise DamagedError(told, run)
    shape = (steps * rows, width)
    missing = numbers(values.is_null()).reshape(shape) if values.null_count else None
    return tidy(table, numbers(recorded[0]), numbers(values).reshape(shape), numbers(absent), missing)


def tidy(
    table: Table,
    steps: np.ndarray | Sequence[int],
    values: np.ndarray,
    absent: np.ndarray,
    missing: np.ndarray | None = None,
) -> pa.Table:
    """Lay out ``values`` (steps * rows, columns) beside their sites; null where absent or missing."""
    count, rows = len(steps), len(table.rows)
    columns = {"step": integers(np.repeat(steps, rows), pa.int64())}
    for name, label in LABELS.items():
        codes, categories = encode([getattr(row, label) for row in table.rows])
        indices = integers(np.tile(codes, count), pa.int32())
        columns[name] = pa.DictionaryArray.from_arrays(indices, strings(categories))
    columns["layer"] = integers(np.tile([row.layer for row in table.rows], count), pa.int32())
    for index, name in enumerate(table.columns):
        columns[name] = floats(values[:, index], ~absent if missing is None else ~(absent | missing[:, index]))
    columns["absent"] = flags(absent)
    schema = part_schema(table)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def metrics_of(records: pa.Table, run: Path) -> pa.Table:
    """Make one row a step, with one float64 column a metric in order of first appearance; null where not given.

    A step may have two records: the part of it that was known first, and the rest. A metric called "step", which an
    older version took, becomes ``step_metric``.
    """
    column = records["metrics"].combine_chunks()
    steps, row = np.unique(numbers(records["step"]), return_inverse=True)
    count = len(steps)
    owner = np.repeat(row, np.diff(numbers(column.offsets)))
    keys = column.keys.dictionary_encode()
    which = numbers(keys.indices)
    given, items = numbers(column.items.is_valid()), numbers(column.items)
    columns = {"step": integers(steps, pa.int64())}
    for code, name in enumerate(keys.dictionary.to_pylist()):
        if not is_name(name):
            raise DamagedError(f"a journal of {run} has a metric called {name[:60]!r}, no name: move it away.", run)
        chosen = which == code
        values, valid = np.zeros(count), np.zeros(count, bool)
        values[owner[chosen]], valid[owner[chosen]] = items[chosen], given[chosen]
        columns["step_metric" if name == "step" else name] = floats(values, valid)
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def compact(run: Path, number: int, journal: Path, tables: Mapping[str, Table], identity: Identity) -> Records:
    """Write journal ``number`` as one part of each table in it, listed in the inventory; return the records of the
    journal.

    A repeated call writes the same files again.
    """
    records = read_records(journal, identity, number)
    if records.table is None:
        return records
    made: list[Part] = [(table.name, number, table_of(records.table, table, run)) for table in tables.values()]
    metrics = metrics_of(records.table, run)
    widened = _widened(run, metrics.schema, identity)
    _write_parts(run, [*made, *widened, (METRICS, number, metrics)], identity)
    return records


Part = tuple[str, int, pa.Table]  # table, number, content


def _write_parts(run: Path, made: Iterable[Part], identity: Identity) -> None:
    """List the parts in the inventory, then write them. A reader that finds a listed part missing reads its journal. A
    part that is written again matches its old or its new digest."""
    encoded = [
        (table, number, numbers(data["step"]), parquet(data, _label(identity, table, number)))
        for table, number, data in made
        if data.num_rows
    ]
    inventory.add(run, [entry_of(table, n, steps, memoryview(file), identity) for table, n, steps, file in encoded])
    for table, number, _, file in encoded:
        replace_file(inside(run, part_path(run, table, number)), file)


def _label(identity: Identity, table: str, number: int) -> dict[bytes, bytes]:
    """Return the label of a part in its footer; {} in a run without an id."""
    label = {"run": identity.run_id, "table": table, "part": number}
    return {OWN: json.dumps(label).encode()} if identity.run_id else {}


def _widened(run: Path, schema: pa.Schema, identity: Identity) -> list[Part]:
    """Give the first metrics part every column of ``schema``: pandas takes a folder's columns from its first file.

    Rewriting one small file when a column first appears is cheaper than a schema fixed beforehand. Later parts need
    nothing: if a file lacks a column, pandas and Arrow fill in nulls. A part that would exceed the largest size that
    readers take stays unchanged.
    """
    present = parts(run, METRICS)
    if not present:
        return []
    first = min(present)
    data = read_part(run, present[first], None, identity)
    new = [field for field in schema if field.name not in data.column_names]
    if data.num_rows * (data.num_columns + len(new)) > MOST_CELLS:
        return []
    for field in new:
        data = data.append_column(field, pa.nulls(data.num_rows, field.type))
    return [(METRICS, first, data)] if new else []


def read_part(
    run: Path, path: Path, schema: pa.Schema | None, identity: Identity, entries: Sequence[Entry] = ()
) -> pa.Table:
    """Read the columns of ``schema`` (None: all) of one part, each under its former name if the part has only that.

    ``entries``: its entries in the inventory; none: not known. The footer is checked before anything is read. It is
    refused if it names another run, table or number, if its CRC (page checksums leave the footer out) or its number of
    rows is not the listed one, and if it has more than :data:`MOST_CELLS` cells.
    """
    with _part(run, path) as file:
        _check_owner(file, path, identity)
        if entries and footer_crc_of(path) not in {entry.footer for entry in entries}:
            raise pa.ArrowException("its footer is not what was written")
        _check_size(file, entries)
        if schema is None:
            if wrong := [name for name in file.schema_arrow.names if not is_name(name)]:
                raise pa.ArrowException(f"a column is called {wrong[0][:60]!r}")
            return _valid(file.read(use_threads=False)).replace_schema_metadata(None)
        names = [found_as(name, file.schema_arrow.names) for name in schema.names]
        return (
            _valid(file.read(columns=names, use_threads=False)).select(names).rename_columns(schema.names).cast(schema)
        )


def _check_owner(file: pq.ParquetFile, path: Path, identity: Identity) -> None:
    table, number = path.parent.name, number_of(path)
    try:
        label = json.loads((file.metadata.metadata or {}).get(OWN, b"null"))
    except (RecursionError, ValueError) as error:
        raise pa.ArrowException("its footer names no run") from error
    named = label.get("run") if isinstance(label, dict) else None
    if not identity.owns(named, number):
        raise pa.ArrowException("it belongs to another run" if named is not None else "it names no run")
    if named is not None and (label.get("table"), label.get("part")) != (table, number):
        told = f"part {label.get('part')} of {label.get('table')}"
        raise pa.ArrowException(f"it is {told[:60]}, in the place of another")


def _check_size(file: pq.ParquetFile, entries: Sequence[Entry]) -> None:
    """Refuse a part by the sizes in its footer: a part of 2 MB may unpack to many gigabytes."""
    found = file.metadata
    cells = found.num_rows * found.num_columns
    size = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
    if entries and found.num_rows not in {entry.rows for entry in entries}:
        raise pa.ArrowException(f"it holds {found.num_rows:,} rows, and {entries[-1].rows:,} were written")
    if cells > MOST_CELLS:
        raise pa.ArrowException(f"it holds {cells:,} cells, more than {MOST_CELLS:,}")
    if size > LARGEST:
        raise pa.ArrowException(f"it unpacks to {size / 1e6:,.0f} MB, more than {LARGEST / 1e6:,.0f} MB")


def _valid(data: pa.Table) -> pa.Table:
    """Check that no index lies beyond its categories: page checksums leave out the pages' own headers."""
    data.validate(full=True)
    return data


def renew(run: Path, table: Table, identity: Identity) -> None:
    """Give parts of an earlier version today's names of columns: pandas takes a folder's columns from its first
    file."""
    schema = part_schema(table)
    for number, path in parts(run, table.name).items():
        with _part(run, path) as file:
            present = file.schema_arrow.names
        if any(found_as(name, present) != name for name in schema.names):
            _write_parts(run, [(table.name, number, read_part(run, path, schema, identity))], identity)


@contextmanager
def _part(run: Path, path: Path) -> Iterator[pq.ParquetFile]:
    """Open a part. A file that is no part of the run raises DamagedError; FileNotFoundError and PermissionError
    pass."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError, KeyError, MemoryError, UnicodeDecodeError, ValueError) as error:
        reason = first_line(error)
        raise DamagedError(
            f"{path} is damaged or not part of the run ({reason.rstrip('.')}): restore it from a copy, or move it away "
            "to read the other steps.",
            run,
        ) from error


def parquet(data: pa.Table, label: Mapping[bytes, bytes] | None = None) -> pa.Buffer:
    """Encode a table as a Parquet file; ``label``: entries of its footer."""
    sink = pa.BufferOutputStream()
    values = [field.name for field in data.schema if field.type == pa.float64()]
    labels = [name for name in data.column_names if name not in (*values, "absent")]
    options: dict[str, Any] = {  # 1.2 to 1.8 times smaller than the defaults, and read as fast
        "write_page_checksum": True,
        "compression": "zstd",
        "use_dictionary": labels,
        "column_encoding": dict.fromkeys(values, "BYTE_STREAM_SPLIT"),
    }
    pq.write_table(data.replace_schema_metadata(label), sink, **options)
    return sink.getvalue()
