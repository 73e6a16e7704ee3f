"""The export of a run: the choice of tables and format. Each format writes its own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ..errors import InputError, UsageError
from ..store import Run
from ..store.combine import By
from ..store.files import make_directory, writing
from ..store.layout import METRICS
from ..store.reader import of_snapshots
from . import files, latex, tensorboard


@dataclass(frozen=True)
class Exported:
    """The folder of an export and the files in it. ``as_they_are``: the tables whose rows do not combine, so that
    ``by`` did not change them."""

    out: Path
    files: tuple[Path, ...]
    as_they_are: tuple[str, ...]


Write = Callable[[Run, Mapping[str, pa.Table], Path], list[Path]]
FORMATS: dict[str, Write] = {
    "csv": files.csv,
    "parquet": files.parquet,
    "tensorboard": tensorboard.scalars,
    "latex": latex.layers,
}


def export(
    run: Run, to: str, out: Path | None = None, tables: Sequence[str] | None = None, by: By | None = None
) -> Exported:
    """Write a run into the new folder ``out`` (``<run>-<format>`` if not given), and return the files.

    ``to``: the format: "csv", "parquet", "tensorboard" or "latex". ``tables``: the tables to write, "metrics" among
    them; by default all. ``by``: "layer" or "sublayer", to combine the rows of each by the table's own rule.

    Raises UsageError for an unknown format or table, or if ``out`` is not empty; InputError for a run that recorded
    nothing; ResourceError if a package is missing.
    """
    if to not in FORMATS:
        raise UsageError(f"unknown format {to!r}; choose one of {', '.join(FORMATS)}.")
    return of_snapshots(lambda now: _exported(now, to, out, tables, by), run)


def _exported(run: Run, to: str, out: Path | None, tables: Sequence[str] | None, by: By | None) -> Exported:
    known = (METRICS, *run.tables)
    chosen = known if tables is None else tuple(tables)
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(f"{run.path} has no table {unknown[0]!r}; it has {', '.join(known)}.")
    if to == "tensorboard":
        tensorboard.writer_class()  # a missing package shows before anything is written
    out = out or Path(f"{run.name}-{to}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} holds something already: choose another --out, or remove it.")
    combine = {name for name in chosen if by and name != METRICS and run.table(name).total}
    data = {name: run.arrow(name, by=by if name in combine else None) for name in chosen}
    data = {name: table for name, table in data.items() if table.num_rows}
    if not data:
        raise InputError(f"{run.path} has recorded nothing of {', '.join(chosen)}: export it after its first steps.")
    with writing(out):
        make_directory(out)
        written = FORMATS[to](run, data, out)
    left = tuple(name for name in data if by and name != METRICS and name not in combine)
    return Exported(out, tuple(written), left)
