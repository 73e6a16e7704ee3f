"""One file a table, and a copy of run.json."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ..store import Run


def csv(run: Run, tables: Mapping[str, pa.Table], out: Path) -> list[Path]:
    """Write ``<table>.csv``: the shortest digits that read back to the same number. Empty: not given, no gradient or no
    such cell; nan: NaN."""
    return _each(run, tables, out, "csv", lambda data, path: pyarrow.csv.write_csv(_plain(data), path))


def parquet(run: Run, tables: Mapping[str, pa.Table], out: Path) -> list[Path]:
    """Write ``<table>.parquet``, as stored, in one file."""
    return _each(run, tables, out, "parquet", lambda data, path: pyarrow.parquet.write_table(data, path))


def _each(
    run: Run, tables: Mapping[str, pa.Table], out: Path, ending: str, write: Callable[[pa.Table, Path], None]
) -> list[Path]:
    written = []
    for name, data in tables.items():
        write(data, path := out / f"{name}.{ending}")
        written.append(path)
    shutil.copyfile(run.path / "run.json", out / "run.json")
    return [*written, out / "run.json"]


def _plain(data: pa.Table) -> pa.Table:
    """Convert labels to text: CSV knows no categories."""
    fields = [pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in data.schema]
    return data.cast(pa.schema(fields))
