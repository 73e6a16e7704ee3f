"""A damaged file costs itself alone, and is never read in silence; what is lost is said once."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from edited_runs import as_schema, edit
from rest_slow import rest_slow
from store_cases import GRAD_NORM, SIMILARITY, TABLES, contents, new_run, put, steps_in

from stabilitylab.errors import DamagedError, InputError
from stabilitylab.export import export
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter, inventory, journal


def flipped(data: bytes, place: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the two fixtures below, of which each test damages a copy."""
    folder = tmp_path_factory.mktemp("made")
    writer = new_run(folder / "left", *range(6))
    writer._lock.release()
    writer = new_run(folder / "closed")
    for first in (0, 2, 4):
        put(writer, first, first + 1)
        writer.seal()
    writer.close()
    writer.set_status("finished", 6)
    return folder


@pytest.fixture
def left(made: Path, tmp_path: Path) -> Path:
    """Steps 0-5 in the journal of a process that is gone."""
    return Path(shutil.copytree(made / "left", tmp_path / "run"))


@pytest.fixture
def closed(made: Path, tmp_path: Path) -> Path:
    """Steps 0-5 in three parts."""
    return Path(shutil.copytree(made / "closed", tmp_path / "run"))


@pytest.mark.parametrize("flips", rest_slow([15, 150], [15]))
def test_a_flipped_bit_in_the_journal_costs_one_record_wherever_it_is(
    left: Path, flips: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, run, chance = left / "journal-000001.records", Run.open(left), random.Random(1)
    data = path.read_bytes()
    starts = [i for i in range(len(data)) if data.startswith(journal.MARK, i)]
    assert len(starts) == 6
    whole = {table.name: run.frame(table.name) for table in TABLES}
    for place in sorted({*starts, *(start + 12 for start in starts), *chance.sample(range(len(data)), flips)}):
        path.write_bytes(flipped(data, place, chance.randrange(8)))
        hit = sum(start <= place for start in starts) - 1
        records = journal.read_records(path)
        assert (records.dropped, records.torn) in ((1, False), (0, True) if hit == 5 else (1, False)), place
        assert run.metrics["step"].tolist() == [step for step in range(6) if step != hit]
        frame = run.frame("grad_norm")
        pd.testing.assert_frame_equal(
            pd.DataFrame(frame), pd.DataFrame(whole["grad_norm"].query(f"step != {hit}").reset_index(drop=True))
        )
    assert "1 damaged record was left out" in caplog.text
    assert len(caplog.records) <= 2  # one sentence for each kind, however often it is read


def test_a_damaged_journal_is_said_compacted_without_the_record_and_kept(
    left: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = left / "journal-000001.records"
    data = path.read_bytes()
    path.write_bytes(flipped(data, data.index(journal.MARK, 100) + 60, 3))
    RunWriter.resume(left, part=2).close()
    assert Run.open(left).metrics["step"].tolist() == [0, 2, 3, 4, 5]
    assert "journal-000001.records: 1 damaged record was left out" in caplog.text
    assert (left / "aside/damaged/journal-000001.records").exists()


def read(run: Run, table: str) -> pa.Table | DamagedError:
    try:
        return run.arrow(table)
    except DamagedError as error:
        return error


@pytest.mark.slow
def test_a_flipped_bit_in_a_part_is_never_read_in_silence(closed: Path) -> None:
    chance, run = random.Random(2), Run.open(closed)
    for table in ("metrics", "grad_norm"):
        whole = run.arrow(table)
        folder = closed / ("metrics" if table == "metrics" else f"probes/{table}")
        path = folder / "part-000002.parquet"
        data, refused = path.read_bytes(), 0
        for _ in range(400):
            path.write_bytes(flipped(data, chance.randrange(len(data)), chance.randrange(8)))
            refusal = read(run, table)
            if isinstance(refusal, DamagedError):
                assert (refusal.run, "restore it from a copy" in str(refusal)) == (closed, True)
                refused += 1
            else:
                assert refusal.equals(whole)
        path.write_bytes(data)
        assert refused > 300


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("metrics/part-000002.parquet", "part 2 of metrics (steps 2 to 3) is missing"),
        ("probes/grad_norm/part-000003.parquet", "part 3 of grad_norm (steps 4 to 5) is missing"),
        ("probes/cosine_similarity", "part 1 of cosine_similarity (step 0) and 1 more is missing"),
    ],
)
def test_what_is_lost_is_said_once(closed: Path, lost: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    path = closed / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    table = Path(lost).parts[-1] if path.suffix == "" else Path(lost).parts[-2]
    for _ in range(3):
        Run.open(closed).frame(table)
    assert [record.getMessage() for record in caplog.records] == [
        f"{closed}: {words}: restore it from a copy; the other steps are read."
    ]


def test_a_gap_in_a_run_without_an_inventory_is_said_too(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    as_schema(closed, 2)
    assert steps_in(closed) == 6
    assert not caplog.records
    (closed / "metrics/part-000002.parquet").unlink()
    assert Run.open(closed).metrics["step"].tolist() == [0, 1, 4, 5]
    assert "part 2 of metrics is missing" in caplog.text


def test_the_inventory_lists_what_stands_there(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = inventory.read(closed)
    assert found is not None
    assert {*found.entries} == {
        *(("metrics", part) for part in (1, 2, 3)),
        *(("grad_norm", part) for part in (1, 2, 3)),
        ("cosine_similarity", 1),
        ("cosine_similarity", 2),
    }
    data = (closed / "inventory.jsonl").read_bytes()
    (closed / "inventory.jsonl").write_bytes(flipped(data, 10, 2)[:-20])
    found = inventory.read(closed)
    assert found is not None
    assert (len(found.entries) <= 7, found.damaged) == (True, 1)  # and a torn line at the end
    with RunWriter.resume(closed, part=4) as writer:  # a torn line makes way for the next
        writer.open(TABLES)
        put(writer, 6)
    found = inventory.read(closed)
    assert found is not None
    assert ("metrics", 4) in found.entries
    assert steps_in(closed) == 7
    RunWriter.resume(closed, part=2).close()
    found = inventory.read(closed)
    assert found is not None
    assert {part for _, part in found.entries} == {1}
    assert steps_in(closed) == 2
    assert [record.getMessage().removeprefix(f"{closed}: ") for record in caplog.records] == [
        "1 lines of inventory.jsonl are damaged, so that lost parts may not show.",
        "inventory.jsonl does not list part 3 of metrics, so that lost parts may not show.",
    ]


def test_a_cell_that_does_not_exist_is_null_and_a_measured_nan_is_nan(tmp_path: Path) -> None:
    rows = (Row("a", "encoder", 1, "self_attn"), Row("b", "encoder", 1, "ffn"), Row("c", "encoder", 2, "ffn"))
    table = Table("grad_norm", ("value", "qk"), rows, total="norm")
    values = np.array([[3.0, np.nan], [4.0, 7.0], [np.nan, np.inf]])
    cells = Cells(values, np.array([False, False, True]), np.array([[0, 0], [0, 1], [1, 1]], bool))
    writer = RunWriter.create(tmp_path / "run", {})
    writer.open([table])
    writer.append(0, {"loss": np.nan, "lr": None}, {"grad_norm": cells})
    run = Run.open(tmp_path / "run")
    for _ in ("journal", "part"):
        stored = run.arrow("grad_norm")
        assert stored["qk"].is_null().to_pylist() == [False, True, True]
        assert np.isnan(stored["qk"][0].as_py())
        assert stored["value"].to_pylist() == [3.0, 4.0, None]
        assert run.frame("grad_norm")["qk"].isna().all()
        layer = run.arrow("grad_norm", by="sublayer")
        assert layer["qk"].is_null().to_pylist() == [False, True, True]
        metrics = run.arrow("metrics")
        assert metrics["lr"].null_count == 1
        assert np.isnan(metrics["loss"][0].as_py())
        writer.seal()
    done = export(run, "csv", tmp_path / "csv")
    assert (tmp_path / "csv/grad_norm.csv").read_text().splitlines()[1:] == [
        '0,"a","encoder",1,"self_attn",3,nan,false',
        '0,"b","encoder",1,"ffn",4,,false',
        '0,"c","encoder",2,"ffn",,,true',
    ]
    assert done.files
    writer.close()


def test_a_group_that_a_row_has_not_adds_nothing_to_its_layer(tmp_path: Path) -> None:
    rows = (Row("a", "encoder", 1, "self_attn"), Row("b", "encoder", 1, "ffn"))
    table = Table("grad_norm", ("value", "qk"), rows, total="norm")
    cells = Cells(np.array([[3.0, 5.0], [4.0, np.nan]]), np.zeros(2, bool), np.array([[0, 0], [0, 1]], bool))
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.open([table])
        writer.append(0, {}, {"grad_norm": cells})
    layer = Run.open(tmp_path / "run").frame("grad_norm", by="layer")
    assert (layer["value"].tolist(), layer["qk"].tolist()) == ([5.0], [5.0])


@pytest.mark.parametrize("name", ["../../../pwned", "/tmp/pwned", "metrics", "a\x1b[31mb", "", "a/b", "x" * 20_000])
@pytest.mark.parametrize("what", ["table", "column", "site"])
def test_names_in_run_json_are_checked(closed: Path, name: str, what: str) -> None:
    document = json.loads((closed / "run.json").read_text())
    entry = document["tables"].pop("grad_norm")
    if what == "column":
        entry["columns"][1] = name
    elif what == "site":
        entry["rows"]["site"][0] = name
    document["tables"][name if what == "table" else "grad_norm"] = entry
    edit(closed / "run.json", document)
    if what == "table" or not name.isprintable() or len(name) > 10_000:
        with pytest.raises(InputError, match=r"run\.json is damaged") as caught:
            Run.open(closed)
        assert len(str(caught.value)) < 500
    else:
        Run.open(closed)


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": "x" * 9999},
        {"schema_version": 10**400},
        {"tables": {"x" * 9999: {}}},
        {"label": ["x"] * 9999},
    ],
)
def test_what_a_sentence_quotes_is_bounded(closed: Path, change: dict) -> None:
    document = json.loads((closed / "run.json").read_text())
    edit(closed / "run.json", document | change)
    with pytest.raises(InputError) as caught:
        Run.open(closed)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("layer", [10**400, -1, "1", None, 1.5, True])
def test_a_layer_is_a_number_of_a_layer(closed: Path, layer: object) -> None:
    document = json.loads((closed / "run.json").read_text())
    document["tables"]["grad_norm"]["rows"]["layer"][0] = layer
    edit(closed / "run.json", document)
    with pytest.raises(DamagedError, match="layer"):
        Run.open(closed)


def test_metrics_of_a_crafted_journal_have_names(left: Path) -> None:
    run = Run.open(left)
    path = left / "journal-000001.records"
    path.unlink()
    crafted = journal.Journal(path, (), run.identity, 1)
    crafted.append(0, {"a\nb": 1.0}, {})
    crafted.release()
    with pytest.raises(DamagedError, match="no name"):
        _ = run.metrics


@pytest.mark.parametrize(
    "name", ["metrics", "metrics/part-000001.parquet", "status.json", "run.json", "inventory.jsonl", "probes"]
)
def test_a_link_out_of_the_run_is_neither_read_nor_written_through(closed: Path, tmp_path: Path, name: str) -> None:
    run = Run.open(closed)
    inner, outer = closed / name, tmp_path / "outside"
    shutil.move(inner, outer)
    inner.symlink_to(outer)
    with pytest.raises(DamagedError, match="is a link out of the run") as caught:
        _ = Run.open(closed), run.status, run.metrics, run.frame("grad_norm")
    assert caught.value.run == closed
    inner.unlink()
    shutil.move(outer, inner)
    assert steps_in(closed) == 6


def test_links_are_not_written_through(tmp_path: Path) -> None:
    for name in ("metrics", "probes"):
        writer = new_run(tmp_path / f"run-{name}", 0)
        (tmp_path / f"outside-{name}").mkdir()
        (writer.path / name).symlink_to(tmp_path / f"outside-{name}")
        with pytest.raises(DamagedError, match="link out of the run"):
            writer.close()
        assert not [*(tmp_path / f"outside-{name}").iterdir()]
    writer = new_run(tmp_path / "run", 0)
    (tmp_path / "mine").write_text("mine")
    (writer.path / f".status.json.{os.getpid()}.tmp").symlink_to(tmp_path / "mine")
    writer.set_status("finished", 1)
    writer.close()
    assert (tmp_path / "mine").read_text() == "mine"
    link = tmp_path / "scratch"  # the run itself may well be reached through a link
    link.symlink_to(tmp_path / "run")
    assert steps_in(link) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"state": "finished", "step": Infinity, "reason": "", "updated": "", "facts": {}}',
        '{"state": "finished", "step": 1e400, "reason": "", "updated": "", "facts": {}}',
        '{"state": "finished", "step": 1' + "0" * 400 + ', "reason": "", "updated": "", "facts": {}}',
        '{"state": "finished", "step": -1, "reason": "", "updated": "", "facts": {}}',
        '{"state": "finished", "step": true, "reason": "", "updated": "", "facts": {}}',
        '{"state": ["finished"], "step": 1, "reason": "", "updated": "", "facts": {}}',
        '{"state": "finished", "step": 1, "reason": "", "updated": "", "facts": []}',
        "[" * 100_000,
        '{"state": "finished", "step": ' + "9" * 5000 + "}",
    ],
)
def test_a_strange_status_is_one_sentence(closed: Path, text: str) -> None:
    (closed / "status.json").write_text(text)
    with pytest.raises(DamagedError, match=r"status\.json is damaged") as caught:
        _ = Run.open(closed).status
    assert len(str(caught.value)) < 500


def test_a_journal_and_parts_of_schema_2_read_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the version before wrote them: a stream of Arrow batches, NaN where there is no cell, no inventory."""
    writer = new_run(tmp_path / "run", 0, 1, 2)
    writer._lock.release()
    found = journal.read_records(tmp_path / "run/journal-000001.records").table
    assert found is not None
    (tmp_path / "run/journal-000001.records").unlink()
    with pa.OSFile(str(tmp_path / "run/journal-000001.arrows"), "wb") as file:
        stream = pa.ipc.new_stream(file, found.schema)
        for batch in found.to_batches(max_chunksize=1):
            stream.write_batch(batch)
    as_schema(tmp_path / "run", 2)
    assert steps_in(tmp_path / "run") == 3
    with RunWriter.resume(tmp_path / "run", part=2) as writer:
        writer.open(TABLES)
        put(writer, 3)
    assert steps_in(tmp_path / "run") == 4
    assert not (tmp_path / "run/journal-000001.arrows").exists()
    assert not caplog.records


def test_a_metric_called_step_does_not_take_the_place_of_the_steps(tmp_path: Path) -> None:
    """Watchers of an older version wrote one."""
    path = tmp_path / "journal-000001.records"
    old = journal.Journal(path, TABLES)
    old.append(0, {"loss": 1.0, "step": 1000.0}, {})
    old.append(3, {"loss": 4.0, "step": 1002.0}, {})
    old.release()
    from stabilitylab.store.parts import metrics_of

    records = journal.read_records(path).table
    assert records is not None
    wanted = {"step": [0, 3], "loss": [1.0, 4.0], "step_metric": [1000.0, 1002.0]}
    assert metrics_of(records, tmp_path).to_pydict() == wanted


def test_a_step_that_comes_in_two_records_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "journal-000001.records"
    two = journal.Journal(path, TABLES)
    two.append(0, {"loss": 1.0}, {"grad_norm": contents(0)["grad_norm"]})
    two.append(0, {"lr": 2.0}, {"cosine_similarity": contents(0)["cosine_similarity"]})
    two.append(3, {"loss": 4.0}, {})
    two.release()
    from stabilitylab.store.parts import metrics_of, table_of

    records = journal.read_records(path).table
    assert records is not None
    assert metrics_of(records, tmp_path).to_pydict() == {"step": [0, 3], "loss": [1.0, 4.0], "lr": [2.0, None]}
    assert table_of(records, GRAD_NORM, tmp_path).num_rows == len(GRAD_NORM.rows)
    assert table_of(records, SIMILARITY, tmp_path).num_rows == len(SIMILARITY.rows)


def test_a_seal_that_dies_between_list_and_files_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is made anew (a metric appeared) is either of the two that are listed."""
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 4)  # brings the metric "late"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stabilitylab.store.parts.replace_file", die)
    with pytest.raises(KeyboardInterrupt):
        writer.seal()
    writer._lock.release()
    monkeypatch.undo()
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [0, 1, 4]
    RunWriter.resume(tmp_path / "run", part=3).close()
    assert Run.open(tmp_path / "run").metrics["late"].tolist()[2] == 12.0
