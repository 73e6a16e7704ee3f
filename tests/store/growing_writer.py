"""A process that writes a run until it is killed: rows in two records as watch() has them, parts, and resumes.

``python growing_writer.py RUN SECONDS`` prints "ready" when rows are there, and resumes the run from its first
checkpoint every so many SECONDS. Some tables have several columns, so that a reader who reads one after the other gets
columns of different length.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from stabilitylab.schema import Cells, Phase, Row, Table
from stabilitylab.store import RunWriter

LAYERS = tuple(Row(f"layers.{n}.self_attn", "decoder", n + 1, "self_attn") for n in range(4))
OUTPUT = (Row("output", "decoder"),)
TABLES = (
    Table("grad_norm", ("value", "qk"), LAYERS, total="norm", phase="backward", log=True),
    Table("ln_input", ("value", "shortcut"), LAYERS, phase="forward"),
    Table("attention", ("entropy", "ceiling", "max_logit"), LAYERS, phase="reference"),
    Table("update_ratio", ("value", "rms"), LAYERS, phase="update", log=True),
    Table("model_update", ("cumulative", "one_update"), OUTPUT, phase="reference"),
    Table("critical_sharpness", ("headroom", "low", "high", "least", "most"), OUTPUT, phase="reference"),
)
EARLY: tuple[Phase, ...] = ("forward", "backward", "reference")  # what is known of a row before its update
ROWS_A_PART = 20
PARENT = os.getppid()  # without which nobody would end it


def cells(table: Table, step: int) -> Cells:
    shape = (len(table.rows), len(table.columns))
    values = 1 + 0.5 * np.random.default_rng([step, len(table.name)]).random(shape)
    return Cells(values, np.zeros(shape[0], bool))


def put(writer: RunWriter, step: int) -> None:
    """One row, first what is known before the update and then all of it."""
    loss = 1 + 3 * float(np.exp(-step / 40))
    early = {table.name: cells(table, step) for table in TABLES if table.phase in EARLY}
    writer.begin(step, {"loss": loss, "grad_norm_total": 1.0}, early)
    rest = {table.name: cells(table, step) for table in TABLES}
    late = {"late": 1.0} if step > 20 else {}  # a metric that comes later: the first part is written anew for it
    writer.append(step, {"loss": loss, "grad_norm_total": 1.0, "lr": 1e-3, **late}, rest)


def write(path: Path, attempt: float) -> None:
    writer, begun, step = RunWriter.create(path, {"label": "growing", "config": {}}), time.monotonic(), 0
    writer.open(TABLES)
    while os.getppid() == PARENT:
        put(writer, step)
        step += 1
        if step % ROWS_A_PART == 0:
            writer.seal()
        if step == 2 * ROWS_A_PART:
            print("ready", flush=True)
        if step > 2 * ROWS_A_PART and time.monotonic() - begun > attempt:  # as after a kill
            writer.close()
            writer, begun, step = RunWriter.resume(path, part=2), time.monotonic(), ROWS_A_PART
            writer.open(TABLES)
        time.sleep(0.002)


if __name__ == "__main__":
    write(Path(sys.argv[1]), float(sys.argv[2]))
