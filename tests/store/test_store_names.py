"""No column has the name of something that every data frame has; runs and code of before still work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from edited_runs import as_schema
from store_cases import GRAD_NORM, TABLES, new_run, put, steps_in

from stabilitylab.errors import UsageError
from stabilitylab.probes import PROBES
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.names import BEFORE, RENAMED
from stabilitylab.store.parts import part_schema


def aged(run: Path) -> Path:
    """The run as an earlier version wrote it: parts with the old names."""
    for part in run.glob("probes/*/part-*.parquet"):
        data = pq.read_table(part, partitioning=None)
        pq.write_table(data.rename_columns([BEFORE.get(name, name) for name in data.column_names]), part)
    return as_schema(run, 2)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Steps 0-3 in a part with the old names, 4 and 5 in the journal."""
    writer = new_run(tmp_path / "run", 0, 1, 2, 3)
    writer.seal()
    put(writer, 4, 5)
    writer._lock.release()
    return aged(tmp_path / "run")


@pytest.mark.parametrize("name", sorted(PROBES))
def test_no_column_of_a_probe_is_hidden_by_pandas(name) -> None:
    hidden = [column for column in PROBES[name].columns if hasattr(pd.DataFrame, column)]
    assert hidden == [], f"columns of {name} have names of pandas' methods: rename them"


def test_no_column_of_places_is_hidden_by_pandas() -> None:
    names = part_schema(Table("", (), ())).names
    assert "stack_name" in names
    hidden = [name for name in (*names, *RENAMED.values()) if hasattr(pd.DataFrame, name)]
    assert hidden == [], "columns of places have names of pandas' methods: rename them"
    needless = [name for name in RENAMED if not hasattr(pd.DataFrame, name)]
    assert needless == [], "RENAMED has names that pandas does not use"


def test_a_run_of_before_is_read_under_the_new_name(old) -> None:
    new = new_run(old.parent / "new", *range(6))
    new.close()
    found, expected = Run.open(old), Run.open(new.path)
    for name in found.tables:
        assert found.arrow(name).equals(expected.arrow(name))
        pd.testing.assert_frame_equal(found.frame(name), expected.frame(name))
    assert found.frame("grad_norm").stack_name.tolist() == [row.stack for row in GRAD_NORM.rows] * 6


def test_columns_of_a_table_of_before_are_read_under_their_new_names(tmp_path: Path) -> None:
    """As an earlier version wrote them: parts and run.json have the old names."""
    before = Table("branch_variance", ("sum", "branch"), (Row("a", "encoder", 1, "ffn"),), total="mean")
    mine = Table("mine", ("sum", "mean"), before.rows)
    both = Cells(np.array([[3.0, 2.0]]), np.array([False]))
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.open([before, mine])
        writer.append(0, {}, {"branch_variance": both, "mine": both})
        writer.seal()
        writer.append(1, {}, {"branch_variance": both, "mine": both})
    run = Run.open(aged(tmp_path / "run"))
    assert run.table("branch_variance").columns == ("total", "branch")
    frame = run.frame("branch_variance", columns=["total"])
    assert frame["total"].tolist() == [3.0, 3.0]
    with pytest.warns(FutureWarning, match="the column 'sum' is called 'total' now"):
        assert frame["sum"].tolist() == [3.0, 3.0]
    with pytest.warns(FutureWarning, match="the column 'sum' is called 'total' now") as caught:
        assert "total" in run.frame("branch_variance", columns=["sum"])
    assert caught[0].filename == __file__
    assert run.frame("mine")["mean"].tolist() == [2.0, 2.0]  # a probe of somebody's own keeps its names


def test_a_resumed_run_of_before_is_one_table_to_pandas(old) -> None:
    with RunWriter.resume(old, 2) as writer:
        writer.open(TABLES)
        put(writer, 4)
    assert steps_in(old) == 5  # by us and by pandas alone
    plain = pd.read_parquet(old / "probes" / "grad_norm")
    assert "stack" not in plain
    assert plain["stack_name"].tolist() == [row.stack for row in GRAD_NORM.rows] * 5


def test_the_old_name_answers_and_says_the_new_one(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 0, 1).close()
    frame = Run.open(tmp_path / "run").frame("grad_norm")
    says = "the column 'stack' is called 'stack_name' now, since DataFrame.stack is a method of pandas: use the new"
    with pytest.warns(FutureWarning, match=says) as caught:
        assert frame["stack"].tolist() == frame["stack_name"].tolist()
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=says) as caught:
        assert frame[["step", "stack"]].columns.tolist() == ["step", "stack_name"]
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=says):
        by_old = frame.groupby(["stack", "layer"], observed=True)["value"].sum()
    assert by_old.equals(frame.groupby(["stack_name", "layer"], observed=True)["value"].sum())
    with pytest.warns(FutureWarning, match=says):
        found = frame.query("stack == 'decoder' and step == 1")
    assert found.equals(frame.query("stack_name == 'decoder' and step == 1"))
    assert len(found) == 1


def test_a_frame_is_pandas_in_all_else(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 0, 1).close()
    frame = Run.open(tmp_path / "run").frame("grad_norm")
    assert callable(frame.stack)
    decoder = frame[frame["stack_name"] == "decoder"]
    with pytest.warns(FutureWarning):  # what comes out of a frame knows the old name too
        assert set(decoder["stack"]) == {"decoder"}
    own = frame.assign(stack=1)  # somebody's own column
    assert own["stack"].tolist() == [1] * len(own)
    with pytest.raises(KeyError, match="'no'"):
        frame["no"]
    with pytest.raises(pd.errors.UndefinedVariableError):
        frame.query("no == 1")


def test_a_metric_of_that_name_is_its_owners(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.append(0, {"stack": 2.0}, {})
    assert Run.open(tmp_path / "run").metrics["stack"].tolist() == [2.0]


def test_a_table_cannot_have_a_column_of_the_old_name(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {}) as writer, pytest.raises(UsageError, match=r"none named .*stack"):
        writer.open([Table("mine", ("stack",), (Row("a"),))])
