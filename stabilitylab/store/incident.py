"""Where a run first broke: ``incident.json``, and the rows around it below ``incident/``, a Parquet file a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DamagedError
from ..schema import Cells, Table
from .arrays import floats, integers
from .documents import read_document, write_document
from .files import inside, make_directory, replace_file
from .identity import Identity
from .layout import METRICS
from .parts import parquet, tidy

FILE, FOLDER = "incident.json", "incident"
Kept = tuple[int, Mapping[str, float | None], Mapping[str, Cells]]  # step, metrics, tables


def write_incident(
    run: Path, facts: Mapping[str, Any], rows: Sequence[Kept], tables: Mapping[str, Table], identity: Identity
) -> None:
    """Writes rows first, so that where ``incident.json`` stands its rows do too."""
    make_directory(inside(run, run / FOLDER))
    replace_file(run / FOLDER / f"{METRICS}.parquet", parquet(_metrics(rows)))
    for name in dict.fromkeys(name for _, _, recorded in rows for name in recorded):
        recorded = [(step, cells[name]) for step, _, cells in rows if name in cells]
        replace_file(run / FOLDER / f"{name}.parquet", parquet(_table(tables[name], recorded)))
    write_document(run, FILE, facts, identity)


def read_incident(run: Path, identity: Identity) -> dict[str, Any] | None:
    """Returns what :class:`stabilitylab.probes.Incident` says, as a dict; None for a run in which every number was
    finite."""
    if not os.path.lexists(run / FILE):
        return None
    facts = read_document(run, FILE, identity)
    if not isinstance(facts.get("step"), int):
        raise DamagedError(f"{run / FILE} is damaged (no step): move it away, or restore it from a copy.", run)
    return facts


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
