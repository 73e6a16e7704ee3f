"""A small run whose every number is known from its place: what the tests of the store write and expect."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

GRAD_NORM = Table(
    "grad_norm",
    ("value", "entries"),
    (
        Row("encoder.embed", "encoder"),
        Row("encoder.layers.0.self_attn.q", "encoder", 1, "self_attn"),
        Row("encoder.layers.0.self_attn.k", "encoder", 1, "self_attn"),
        Row("encoder.layers.0.ffn.fc1", "encoder", 1, "ffn"),
        Row("decoder.layers.0.ffn.fc1", "decoder", 1, "ffn"),
    ),
    unit="L2 norm",
    definition="norm of the gradient",
    total="norm",
)
SIMILARITY = Table(
    "cosine_similarity",
    ("value",),
    (Row("encoder.layers.0", "encoder", 1), Row("encoder.layers.1", "encoder", 2)),
)
TABLES = (GRAD_NORM, SIMILARITY)
CONFIG = {"model": {"arch": "branchnorm", "alpha": None}, "train": {"seed": 3}, "probes": {"names": ["a", "b"]}}


def cells(table: Table, step: int) -> Cells:
    rows, columns = np.arange(len(table.rows)), np.arange(len(table.columns))
    return Cells(step * 100.0 + rows[:, None] * 10.0 + columns, (rows + step) % 4 == 0)


def metrics(step: int) -> dict[str, float | None]:
    late = {"late": step * 3.0} if step >= 4 else {}  # a column that appears in a later part
    return {"loss": step * 2.0, "alpha": None} | late


def contents(step: int) -> Mapping[str, Cells]:
    """grad_norm at every step, cosine_similarity at every third."""
    tables = TABLES if step % 3 == 0 else (GRAD_NORM,)
    return {table.name: cells(table, step) for table in tables}


def put(writer: RunWriter, *steps: int) -> None:
    for step in steps:
        writer.append(step, metrics(step), contents(step))


def new_run(path: Path, *steps: int) -> RunWriter:
    writer = RunWriter.create(path, {"config": CONFIG, "argv": ["stabilitylab", "probe"]})
    writer.open(TABLES)
    put(writer, *steps)
    return writer


@contextmanager
def full_device(name: str) -> Iterator[None]:
    """Whoever writes a file of that name writes to /dev/full."""
    opened = os.open

    def to_full(path: Any, flags: int, *rest: Any) -> int:
        if Path(path).name.startswith(f".{name}."):
            return opened("/dev/full", os.O_WRONLY)
        return opened(path, flags, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", to_full)
        yield


def steps_in(path: Path, live: bool = False) -> int:
    """How many steps the run holds, after a check that every table holds 0, 1, 2, ... once and with the right numbers.

    What stands in Parquet must read without us, too, and say the same. ``live``: more may be written meanwhile.
    """
    run = Run.open(path)
    read = run.metrics
    count = _check_metrics(read, list(range(len(read))))
    for table in TABLES:
        if table.name in run.tables:
            frame = run.frame(table.name)
            last = frame["step"].max() + 1 if live and len(frame) else count
            assert last >= count - 3
            _check(frame, table, [step for step in range(last) if table.name in contents(step)])
        plain = _by_pandas(path / "probes" / table.name)
        if plain is not None:
            _check(plain, table, sorted(plain["step"].unique()))
    plain = _by_pandas(path / "metrics")
    if plain is not None:
        _check_metrics(plain, sorted(plain["step"].unique()))
    return count


def _by_pandas(folder: Path) -> pd.DataFrame | None:
    return pd.read_parquet(folder) if folder.is_dir() and any(folder.glob("part-*")) else None


def _check_metrics(frame: pd.DataFrame, steps: list[int]) -> int:
    assert frame["step"].tolist() == steps
    if steps:
        assert frame["loss"].tolist() == [step * 2.0 for step in steps]
    if steps and steps[-1] >= 4:
        assert frame["late"].dropna().tolist() == [step * 3.0 for step in steps if step >= 4]
    return len(steps)


def _check(frame: pd.DataFrame, table: Table, steps: list[int]) -> None:
    assert frame["step"].tolist() == [step for step in steps for _ in table.rows]
    for label in ("site", "stack", "layer", "sublayer"):
        column = "stack_name" if label == "stack" else label
        assert frame[column].tolist() == [getattr(row, label) for row in table.rows] * len(steps)
    if not steps:
        return
    values = np.concatenate([np.where(c.absent[:, None], np.nan, c.values) for c in (cells(table, s) for s in steps)])
    np.testing.assert_array_equal(frame[list(table.columns)].to_numpy(), values)
    assert frame["absent"].tolist() == np.concatenate([cells(table, step).absent for step in steps]).tolist()
