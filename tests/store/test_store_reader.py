"""Frames of a run, at any moment of its life."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_cases import CONFIG, GRAD_NORM, SIMILARITY, TABLES, cells, new_run, put, steps_in

from stabilitylab.errors import InputError, UsageError
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter, inventory, load_runs, pieces
from stabilitylab.store.combine import combine


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Steps 0-3 in a part, 4 and 5 in the journal."""
    writer = new_run(tmp_path / "run", 0, 1, 2, 3)
    writer.seal()
    put(writer, 4, 5)
    writer._lock.release()
    return Run.open(tmp_path / "run")


def test_a_frame_is_tidy(run: Run) -> None:
    frame = run.frame("grad_norm")
    assert frame.columns.tolist() == ["step", "stack_name", "layer", "sublayer", "site", "value", "entries", "absent"]
    assert frame.dtypes.astype(str).tolist() == [
        "int64",
        "category",
        "int32",
        *["category"] * 2,
        *["float64"] * 2,
        "bool",
    ]
    assert len(frame) == 6 * 5
    row = frame[(frame["step"] == 4) & (frame["site"] == "encoder.layers.0.ffn.fc1")].iloc[0]
    assert (row["stack_name"], row["layer"], row["sublayer"], row["value"], row["entries"]) == (
        "encoder",
        1,
        "ffn",
        430,
        431,
    )
    assert frame["absent"].sum() == sum(cells(GRAD_NORM, step).absent.sum() for step in range(6))
    assert frame.loc[frame["absent"], ["value", "entries"]].isna().all(axis=None)
    assert run.frame("cosine_similarity")["step"].tolist() == [0, 0, 3, 3]


def test_the_same_frame_by_pandas_alone_once_the_run_has_ended(tmp_path: Path) -> None:
    new_run(tmp_path / "run", *range(7)).close()
    plain = pd.read_parquet(tmp_path / "run" / "probes" / "grad_norm")
    frame = Run.open(tmp_path / "run").frame("grad_norm")
    pd.testing.assert_frame_equal(plain[frame.columns.tolist()], pd.DataFrame(frame))
    assert plain.columns.tolist() == ["step", "site", "stack_name", "layer", "sublayer", "value", "entries", "absent"]


def test_metrics_have_one_row_a_step_and_every_column(run: Run) -> None:
    assert run.metrics.columns.tolist() == ["step", "loss", "alpha", "late"]
    assert run.metrics["loss"].tolist() == [0, 2, 4, 6, 8, 10]
    assert run.metrics["late"].tolist()[4:] == [12, 15]
    assert run.metrics["late"].isna().tolist() == [True] * 4 + [False] * 2
    assert run.frame("metrics", columns=["late"]).columns.tolist() == ["step", "late"]


def test_pandas_sees_a_metric_that_appears_in_a_later_part(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 4)
    writer.close()
    plain = pd.read_parquet(tmp_path / "run" / "metrics")
    assert plain["step"].tolist() == [0, 1, 4]
    assert plain["late"].tolist()[2] == 12


def test_a_metric_not_given_is_null_and_nan_is_nan(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {}) as writer:
        for step, value in enumerate([None, math.nan, math.inf, 0.0]):
            writer.append(step, {"loss": value}, {})
    stored = Run.open(tmp_path / "run").arrow("metrics")["loss"]
    assert stored.is_null().to_pylist() == [True, False, False, False]
    assert stored.to_pylist()[2:] == [math.inf, 0.0]


def test_columns_and_configuration_on_request(run: Run) -> None:
    frame = run.frame("grad_norm", columns=["entries"], config=["model.arch", "train.seed", "probes.names"])
    assert frame.columns.tolist()[5:] == ["entries", "absent", "model.arch", "train.seed", "probes.names"]
    assert frame.iloc[0, 7:].tolist() == ["branchnorm", 3, "a,b"]
    assert frame["model.arch"].dtype == "category"
    every = run.frame("metrics", config=True)
    assert every.columns.tolist()[4:] == ["model.arch", "model.alpha", "train.seed", "probes.names"]
    assert every["model.alpha"].isna().all()
    assert len(run.frame("metrics", config=False).columns) == 4
    with pytest.raises(UsageError, match=r"no setting 'train\.lr'; it has model\.arch, model\.alpha, train\.seed"):
        run.frame("metrics", config=["train.lr"])
    with pytest.raises(UsageError, match=r"'grad_norm' of .* has no column 'p99'; it has value, entries"):
        run.frame("grad_norm", columns=["p99"])
    with pytest.raises(UsageError, match=r"'metrics' of .* has no column 'nll'; it has loss, alpha, late"):
        run.frame("metrics", columns=["nll"])


def test_rows_combine_by_layer_and_by_sublayer(run: Run) -> None:
    rows = run.frame("grad_norm")
    layers = run.frame("grad_norm", by="layer")
    assert layers.columns.tolist() == ["step", "stack_name", "layer", "value", "entries", "absent"]
    assert run.frame("grad_norm", by="sublayer").columns.tolist()[:4] == ["step", "stack_name", "layer", "sublayer"]
    for by, keys in (("layer", ["stack_name", "layer"]), ("sublayer", ["stack_name", "layer", "sublayer"])):
        for place, group in run.frame("grad_norm", by=by).groupby(["step", *keys], observed=True):
            members = rows[(rows[["step", *keys]].astype(object) == list(place)).all(axis=1)]
            present = members[~members["absent"]]
            assert group["absent"].tolist() == [present.empty]
            expected = np.nan if present.empty else math.sqrt(sum(value**2 for value in present["value"]))
            np.testing.assert_allclose(group["value"], [expected], rtol=1e-14)
    with pytest.raises(UsageError, match=r"rows of 'cosine_similarity' do not combine.*leave out by='layer'"):
        run.frame("cosine_similarity", by="layer")
    with pytest.raises(UsageError, match="combine by 'layer' or 'sublayer', not by 'stack'"):
        run.frame("grad_norm", by="stack")
    with pytest.raises(UsageError, match="metrics have one row a step"):
        run.frame("metrics", by="layer")


SCATTERED = tuple(Row(f"{i}", "encoder", layer) for i, layer in enumerate([2, 1, 2, 1, 2]))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


@given(st.lists(NUMBERS, min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_norm_and_mean_of_scattered_rows_without_underflow(values: list[float], absent: list[bool]) -> None:
    for total, rule in (("norm", math.hypot), ("mean", lambda *present: math.fsum(v / len(present) for v in present))):
        table = Table("t", ("value",), SCATTERED, total=total)
        rows, columns, _, gone = combine(table, {"value": np.array([values])}, np.array([absent]), "layer")
        assert [row.layer for row in rows] == [2, 1]
        for index, members in enumerate(([0, 2, 4], [1, 3])):
            present = [values[i] for i in members if not absent[i]]
            assert gone[0, index] == (not present)
            result = columns["value"][0, index]
            if present:
                scale = max(map(abs, present))
                assert result == pytest.approx(rule(*present), rel=1e-12, abs=1e-12 * scale + 5e-324)
            else:
                assert math.isnan(result)


def test_nan_and_inf_pass_through_a_total() -> None:
    for total in ("norm", "mean"):
        table = Table("t", ("value",), SCATTERED, total=total)
        values = np.array([[math.inf, math.nan, 1.0, 2.0, 3.0], [0.0, 1e-200, 0.0, 1e-200, 0.0]])
        _, columns, _, gone = combine(table, {"value": values}, np.zeros((2, 5), bool), "layer")
        assert columns["value"][0, 0] == math.inf
        assert math.isnan(columns["value"][0, 1])
        assert columns["value"][1, 0] == 0
        assert columns["value"][1, 1] == pytest.approx(1e-200 * (math.sqrt(2) if total == "norm" else 1), rel=1e-14)
        assert not gone.any()


def test_what_a_run_says_about_itself(run: Run, tmp_path: Path) -> None:
    assert (run.name, run.path, run.config) == ("run", tmp_path / "run", CONFIG)
    assert run.tables == ("grad_norm", "cosine_similarity")
    assert run.table("grad_norm") == GRAD_NORM
    assert run.table("cosine_similarity") == SIMILARITY
    assert run.manifest["argv"] == ["stabilitylab", "probe"]
    assert repr(run) == f"Run({str(tmp_path / 'run')!r})"
    with pytest.raises(InputError, match="has no table 'ln_input'; it has metrics, grad_norm, cosine_similarity"):
        run.frame("ln_input")


def test_a_run_without_rows_yet_has_typed_empty_frames(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    frame = run.frame("grad_norm", by="layer", config=["train.seed", "model.arch"])
    assert frame.columns.tolist() == [
        "step",
        "stack_name",
        "layer",
        "value",
        "entries",
        "absent",
        "train.seed",
        "model.arch",
    ]
    assert frame.empty
    assert frame["value"].dtype == "float64"
    assert run.metrics.columns.tolist() == ["step"]
    assert writer.seal() == 1
    put(writer, 0)
    assert len(run.frame("grad_norm")) == 5  # the same object reads on while the run goes on
    writer.close()


def test_status_through_a_life(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1, 2)
    run = Run.open(tmp_path / "run")
    assert (run.status.state, run.status.step) == ("running", 2)
    writer._lock.release()  # what the kernel does at kill -9
    assert (run.status.state, run.status.step) == ("interrupted", 2)
    assert run.status.reason == "the process was killed, or its machine was lost"
    (tmp_path / "run" / ".lock").unlink()  # copied elsewhere without hidden files
    assert run.status.state == "interrupted"
    writer = RunWriter.resume(tmp_path / "run", part=1)
    assert (run.status.state, run.status.step) == ("running", 0)
    writer.close()
    writer.set_status("diverged", 7, "loss is nan", loss=math.nan, since=np.int64(5), path=tmp_path, ids={1})
    assert (run.status.state, run.status.step, run.status.reason) == ("diverged", 7, "loss is nan")
    assert run.status.facts == {"loss": "nan", "since": 5, "path": str(tmp_path), "ids": [1]}
    json.loads((tmp_path / "run" / "status.json").read_text(), parse_constant=pytest.fail)


def test_run_json_keeps_every_attempt_and_what_it_changed(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 0, 1).close()
    longer = CONFIG | {"train": {"seed": 3, "steps": 10}}
    manifest = {"config": longer, "argv": ["again"], "created": "later"}
    with RunWriter.resume(tmp_path / "run", part=2, manifest=manifest) as writer:
        writer.record(probes_dropped=["activation_sparsity"])
    run = Run.open(tmp_path / "run")
    first, second = run.manifest["attempts"]
    assert run.config == longer
    assert run.manifest["created"] != "later"
    assert run.manifest["probes_dropped"] == ["activation_sparsity"]
    assert (first["argv"], first["part"]) == (["stabilitylab", "probe"], 1)
    assert (second["argv"], second["part"]) == (["again"], 2)
    assert second["replaced"] == {"config": CONFIG, "argv": ["stabilitylab", "probe"]}
    assert run.tables == ("grad_norm", "cosine_similarity")
    with RunWriter.resume(tmp_path / "run", 2, ["third"]):
        assert Run.open(tmp_path / "run").manifest["attempts"][2]["argv"] == ["third"]


def test_a_resume_moves_later_parts_aside_and_keeps_them(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    part = writer.seal()
    put(writer, 2, 3)
    writer.seal()
    put(writer, 4)
    writer._lock.release()
    with RunWriter.resume(tmp_path / "run", part) as writer:
        assert steps_in(tmp_path / "run") == 2
        writer.open(TABLES)
        put(writer, 2)
    assert steps_in(tmp_path / "run") == 3
    aside = tmp_path / "run" / "aside" / "attempt-1"
    assert {str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()} == {
        "journal-000003.records",
        "metrics/part-000002.parquet",
        "probes/cosine_similarity/part-000002.parquet",
        "probes/grad_norm/part-000002.parquet",
    }


def test_a_table_that_joins_at_a_resume(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 0).close()
    extra = Table("extra", ("value",), (Row("a"), Row("b")))
    with RunWriter.resume(tmp_path / "run", part=2) as writer:
        writer.open([*TABLES, extra])
        writer.append(1, {}, {"extra": Cells(np.ones((2, 1)), np.zeros(2, bool))})
        assert Run.open(tmp_path / "run").frame("extra")["step"].tolist() == [1, 1]
    run = Run.open(tmp_path / "run")
    assert run.frame("extra")["step"].tolist() == [1, 1]
    assert run.frame("grad_norm")["step"].tolist() == [0] * 5


def test_a_read_that_races_with_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    original, raced = pieces.read_records, []

    def race(path: Path, *more):
        if not raced:  # the journal was listed, and becomes parts before it is read
            raced.append(path)
            writer.seal()
        return original(path, *more)

    monkeypatch.setattr(pieces, "read_records", race)
    assert Run.open(tmp_path / "run").frame("grad_norm")["step"].tolist() == [0] * 5 + [1] * 5
    assert raced
    put(writer, 2)

    def vanish(path: Path, *more):
        raise FileNotFoundError(path)

    monkeypatch.setattr(pieces, "read_records", vanish)
    with pytest.raises(InputError, match="keep vanishing while they are read"):
        Run.open(tmp_path / "run").frame("grad_norm")
    writer.close()


def test_a_writer_that_compacts_at_every_read_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_run(tmp_path / "run", 0)
    original, reads = pieces.read_records, []

    def race(path: Path, *more):
        reads.append(path)
        writer.seal()
        put(writer, len(reads))
        return original(path, *more)

    monkeypatch.setattr(pieces, "read_records", race)
    assert Run.open(tmp_path / "run").frame("grad_norm")["step"].tolist() == [0] * 5
    assert len(reads) == 1
    writer.close()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_read_that_races_with_a_new_column_of_the_first_part(
    snapshot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer writes the first part again after the reader has read the inventory."""
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 4)  # has a metric that the first part lacks
    run, read = Run.open(tmp_path / "run"), inventory.read

    def then_the_writer_seals(*asked: Any) -> Any:
        found = read(*asked)
        monkeypatch.setattr(inventory, "read", read)
        writer.seal()
        return found

    monkeypatch.setattr(inventory, "read", then_the_writer_seals)
    metrics = (run.snapshot() if snapshot else run).metrics
    assert metrics["step"].tolist() == [0, 1, 4]
    np.testing.assert_array_equal(metrics["late"], [np.nan, np.nan, 12.0])
    writer.close()


def test_flush_may_be_called_at_any_time(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    writer.flush()
    put(writer, 0)
    writer.flush()
    assert steps_in(tmp_path / "run") == 1
    writer.close()
    writer.close()
    assert steps_in(tmp_path / "run") == 1


def test_load_runs_finds_all_and_reports_the_broken_one(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        new_run(tmp_path / name, 0).close()
    (tmp_path / "notes").mkdir()
    assert [run.name for run in load_runs(tmp_path)] == ["a", "b", "c"]
    (tmp_path / "b" / "run.json").write_text("{")
    broken: list[tuple[Path, str]] = []
    assert [run.name for run in load_runs(tmp_path, broken)] == ["a", "c"]
    assert [path for path, _ in broken] == [tmp_path / "b"]
    assert "run.json is damaged" in broken[0][1]
    with pytest.raises(InputError, match="damaged"):
        load_runs(tmp_path)
    with pytest.raises(InputError, match="there is no directory"):
        load_runs(tmp_path / "nowhere")


@pytest.mark.slow
def test_writing_imports_neither_torch_nor_pandas_and_reading_no_torch(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import numpy as np
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter
writer = RunWriter.create({str(tmp_path / "run")!r}, {{}})
writer.open([Table("t", ("value",), (Row("a"),))])
writer.append(0, {{"loss": 1.0}}, {{"t": Cells(np.ones((1, 1)), np.zeros(1, bool))}})
writer.close()
assert not {{"pandas", "torch", "matplotlib"}} & sys.modules.keys()
assert len(Run.open(writer.path).frame("t")) == 1
assert not {{"torch", "matplotlib", "pydantic"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
