"""The place at which a run first broke: ``incident.json``, and the rows around it below ``incident/``, one Parquet file
a table.

``incident.json`` lists the SHA-256 of each of these files. For a file that was written again it lists the former
digests too, since a crash may have left the former file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DamagedError, InputError
from ..schema import Cells, Table
from .arrays import floats, integers
from .aside import free_place
from .documents import read_document, write_document
from .files import inside, make_directory, replace_file, sync_directory, writing
from .identity import Identity
from .layout import METRICS, TABLE_NAME
from .parts import parquet, tidy

FILE, FOLDER = "incident.json", "incident"
DIGESTS = "files"  # entry of incident.json: table -> digests that its file may have
Kept = tuple[int, Mapping[str, float | None], Mapping[str, Cells]]  # step, metrics, tables


def write_incident(
    run: Path, facts: Mapping[str, Any], rows: Sequence[Kept], tables: Mapping[str, Table], identity: Identity
) -> None:
    """Write new files of rows, then ``incident.json``, then files that replace older ones.

    If ``incident.json`` exists, the files that it lists exist too. It lists former digests beside the new ones, so
    replaced files may be written after it.
    """
    make_directory(inside(run, run / FOLDER))
    files = {METRICS: parquet(_metrics(rows))}
    for name in dict.fromkeys(name for _, _, recorded in rows for name in recorded):
        recorded = [(step, cells[name]) for step, _, cells in rows if name in cells]
        files[name] = parquet(_table(tables[name], recorded))
    before: dict[str, list[str]] = {}
    if os.path.lexists(run / FILE):
        with suppress(InputError):  # damaged, or another run's: it makes way
            before = listed(run, identity)
    for name in files.keys() - before.keys():
        replace_file(rows_path(run, name), files[name])
    digests = {name: [*before.get(name, [])[-2:], sha256(memoryview(data)).hexdigest()] for name, data in files.items()}
    write_document(run, FILE, {**facts, DIGESTS: digests}, identity)
    for name in files.keys() & before.keys():
        replace_file(rows_path(run, name), files[name])


def rows_path(run: Path, table: str) -> Path:
    """Return the path of the rows of a table around the incident."""
    return inside(run, run / FOLDER / f"{table}.parquet")


def listed(run: Path, identity: Identity) -> dict[str, list[str]]:
    """Return the digests that the file of each table below ``incident/`` may have; {} for a run of schema 3 and
    before."""
    found = read_document(run, FILE, identity).get(DIGESTS, {})
    if not isinstance(found, dict) or not all(
        TABLE_NAME.fullmatch(name) and isinstance(digests, list) and all(isinstance(one, str) for one in digests)
        for name, digests in found.items()
    ):
        raise DamagedError(f"{run / FILE} is damaged (no list of files): restore it from a copy.", run)
    return found


def read_incident(run: Path, identity: Identity) -> dict[str, Any] | None:
    """Return the facts of :class:`stabilitylab.probes.Incident` as a dict; None for a run in which every number was
    finite."""
    if not os.path.lexists(run / FILE):
        return None
    facts = read_document(run, FILE, identity)
    facts.pop(DIGESTS, None)
    if not isinstance(facts.get("step"), int):
        raise DamagedError(f"{run / FILE} is damaged (no step): move it away, or restore it from a copy.", run)
    return facts


def keep_until(run: Path, step: int, attempt: int, identity: Identity) -> None:
    """Move an incident after ``step`` to aside/: a resumed run makes these rows anew. A damaged file stays."""
    if os.path.lexists(run / FILE):
        try:
            facts = read_incident(run, identity)
        except InputError:
            return
        if facts is not None and facts["step"] <= step:
            return
    with writing(run):
        for path in (run / FILE, run / FOLDER):  # without incident.json nobody reads the folder
            if os.path.lexists(path):
                os.replace(path, free_place(run, f"attempt-{attempt}", path))
        sync_directory(run)


def _metrics(rows: Sequence[Kept]) -> pa.Table:
    names = dict.fromkeys(name for _, metrics, _ in rows for name in metrics)
    columns = {"step": integers([step for step, _, _ in rows], pa.int64())}
    for name in names:
        values = [metrics.get(name) for _, metrics, _ in rows]
        given = np.array([value is not None for value in values])
        columns[name] = floats(np.array([np.nan if value is None else value for value in values]), given)
    return pa.table(columns)


def _table(table: Table, recorded: Sequence[tuple[int, Cells]]) -> pa.Table:
    values = np.concatenate([cells.values for _, cells in recorded])
    absent = np.concatenate([cells.absent for _, cells in recorded])
    none = np.zeros((len(table.rows), len(table.columns)), bool)
    missing = np.concatenate([none if cells.missing is None else cells.missing for _, cells in recorded])
    return tidy(table, [step for step, _ in recorded], values, absent, missing)
