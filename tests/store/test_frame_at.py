"""One step of a table is what the whole table has of it, and a snapshot's stamp says if it is the same as another."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.arrays import steps_in

ROWS = tuple(Row(f"stack.{n}.{part}", "stack", n, part) for n in (1, 2) for part in ("attn", "ffn"))
TABLE = Table("grad_norm", ("value", "qk"), ROWS, "L2 norm", "", "norm", "backward", log=True)
STEPS = (0, 1, 4, 9)


def write(path: Path, last: float = 1.0) -> Path:
    random = np.random.default_rng(0)
    with RunWriter.create(path, {"label": "x"}) as run:
        run.open([TABLE])
        for step in STEPS:
            values = random.normal(size=(4, 2))
            values[0, 0] = math.nan if step == 4 else last
            absent = np.array([False, False, step == 9, False])
            run.append(step, {"loss": 1.0}, {"grad_norm": Cells(values, absent)})
        run.set_status("finished", 9, "")
    return path


@pytest.mark.parametrize("by", [None, "layer"])
@pytest.mark.parametrize("columns", [None, ["qk"]])
@pytest.mark.parametrize(("step", "nearest"), [(None, 9), (0, 0), (2, 1), (3, 4), (100, 9), (-5, 0)])
def test_one_step_is_that_of_the_whole_table(tmp_path: Path, by, columns, step: int | None, nearest: int) -> None:
    run = Run.open(write(tmp_path / "a"))
    whole = run.frame("grad_norm", columns=columns, by=by)
    expected = whole.loc[whole["step"] == nearest].reset_index(drop=True)
    pd.testing.assert_frame_equal(run.frame_at("grad_norm", step, columns=columns, by=by), expected)
    pd.testing.assert_frame_equal(run.snapshot().frame_at("grad_norm", step, columns=columns, by=by), expected)


def test_several_steps_are_those_of_the_whole_table_each_once(tmp_path: Path) -> None:
    run = Run.open(write(tmp_path / "a"))
    whole = run.frame("grad_norm")
    expected = whole.loc[whole["step"].isin([1, 9])].reset_index(drop=True)
    pd.testing.assert_frame_equal(run.frame_at("grad_norm", [100, 2, 1]), expected)


@pytest.mark.slow
def test_no_table_outlives_its_reader(tmp_path: Path) -> None:
    """A process that made a report keeps none of the tables that it read."""
    run = Run.open(write(tmp_path / "a")).snapshot()
    gone = [weakref.ref(run), weakref.ref(run._pieces)]  # pyright: ignore[reportAttributeAccessIssue]
    assert len(run.frame_at("grad_norm", 0)) == len(ROWS)
    del run
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_steps_of_a_table_and_of_one_without_rows(tmp_path: Path) -> None:
    assert Run.open(write(tmp_path / "a")).steps("grad_norm").tolist() == [*STEPS]
    with RunWriter.create(tmp_path / "b", {"label": "x"}) as run:
        run.open([TABLE])
        run.set_status("finished", 0, "")
    empty = Run.open(tmp_path / "b")
    assert empty.steps("grad_norm").tolist() == []
    assert empty.frame_at("grad_norm").empty


def test_steps_in_a_column() -> None:
    assert steps_in(np.repeat([0, 3, 7], 5)).tolist() == [0, 3, 7]
    assert steps_in(np.repeat([5, 3], 2)).tolist() == [3, 5]
    assert steps_in(np.empty(0, int)).tolist() == []


def test_a_stamp_is_of_all_files_and_of_ended_runs_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    before = Run.open(path).snapshot().stamp
    assert before is not None
    assert Run.open(path).snapshot().stamp == before
    assert Run.open(path).stamp is None  # no snapshot
    status = path / "status.json"
    status.write_bytes(status.read_bytes())
    assert Run.open(path).snapshot().stamp != before
    with RunWriter.create(tmp_path / "b", {"label": "x"}) as run:
        run.open([TABLE])
        run.append(0, {"loss": 1.0}, {})
        assert Run.open(tmp_path / "b").snapshot().stamp is None  # it goes on


@pytest.mark.parametrize("by", [None, "layer", "sublayer"])
@pytest.mark.parametrize("column", ["", "qk"])
def test_cells_are_those_of_the_frame(tmp_path: Path, by, column: str) -> None:
    run = Run.open(write(tmp_path / "a"))
    found, frame = run.cells("grad_norm", column, by=by), run.frame("grad_norm", by=by)
    shape = (len(STEPS), len(found.rows))
    assert found.steps.tolist() == list(STEPS)
    assert np.ravel(found.values).tolist() == pytest.approx(frame[column or "value"].tolist(), nan_ok=True)
    assert found.absent.ravel().tolist() == frame["absent"].tolist()
    assert np.shape(found.values) == shape == found.absent.shape == found.missing.shape
    assert [row.layer for row in found.rows] == frame["layer"].tolist()[: len(found.rows)]
    empty = run.arrow("grad_norm", by=by)[column or "value"].is_null().to_numpy()
    assert found.missing.ravel().tolist() == empty.tolist()
