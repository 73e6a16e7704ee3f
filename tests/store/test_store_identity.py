"""Every file of a run says whose it is, and every JSON file has a checksum; what older versions wrote still reads."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from edited_runs import as_schema, edit
from store_cases import TABLES, contents, new_run, put, steps_in
from test_store_crash import dying_at

from stabilitylab.errors import DamagedError, InputError, UsageError
from stabilitylab.store import Run, RunWriter, inventory, journal
from stabilitylab.store.digest import Hashed, seal_of
from stabilitylab.store.evaluation import write_evaluation
from stabilitylab.store.incident import write_incident
from stabilitylab.store.lines import line_of
from stabilitylab.store.verify import verify

JSON_FILES = ("run.json", "status.json", "incident.json", "evaluation.json")


def everything(path: Path, first: int = 0) -> Path:
    """Two parts, an open journal, a checkpoint, an incident, an evaluation."""
    writer = new_run(path, first, first + 1)
    writer.seal()
    put(writer, first + 2)
    writer.seal()
    put(writer, first + 3)
    writer.incident({"step": 3, "paragraph": "Step 3: the loss is NaN."}, [(3, {"loss": 1.0}, contents(3))])
    (path / "checkpoints").mkdir()
    with (path / "checkpoints/step-00000003.pt").open("xb") as file:
        hashed = Hashed(file, writer.run_id)
        hashed.write(b"some weights" * 100 + b"\0\0")
        hashed.seal()
    write_evaluation(path, {"bleu": 12.5})
    writer._lock.release()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def made(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_every_file_names_its_run(made: Path) -> None:
    own = Run.open(made).identity.run_id
    assert len(own) == 32
    for name in JSON_FILES:
        assert json.loads((made / name).read_text())["run_id"] == own
    for line in (made / "inventory.jsonl").read_text().splitlines():
        assert json.loads(line.rpartition(" ")[0])["run"] == own
    for path in made.rglob("part-*.parquet"):
        label = json.loads(pq.read_metadata(path).metadata[b"stabilitylab"])
        assert label == {"run": own, "table": path.parent.name, "part": int(path.stem[5:])}
    for frame in journal._frames((made / "journal-000003.records").read_bytes()):
        assert (frame.run, frame.journal) == (own, 3)
    assert seal_of(made / "checkpoints/step-00000003.pt") == (True, own)
    assert verify(made).findings == []
    assert verify(made).unchecked == 0


def test_ids_are_random_and_no_generator_moves(tmp_path: Path) -> None:
    ids = set()
    for name in "abc":
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        with new_run(tmp_path / name, 0) as writer:
            ids.add(writer.run_id)
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert after == before
    assert len(ids) == 3


def test_checksums_wait_for_the_disk_no_more_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_run(tmp_path / "run")
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    writer.set_status("running", 0)
    assert len(synced) == 2  # the file, the directory
    put(writer, 0, 1)  # the first row begins a journal, and the inventory lists it
    assert len(synced) == 2
    writer.record(note=1)
    assert len(synced) == 4


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("status.json", "status"),
        ("incident.json", "incident"),
        ("evaluation.json", "evaluation"),
    ],
)
def test_a_json_file_of_another_run_is_refused(made: Path, tmp_path: Path, name: str, place: str) -> None:
    other = everything(tmp_path / "other")
    shutil.copy(other / name, made / name)
    with pytest.raises(DamagedError, match=f"{name} belongs to another run than run.json: restore it from a copy"):
        getattr(Run.open(made), place)
    assert any(f"{name} belongs to another run" in finding for finding in verify(made).findings)


def test_a_run_json_of_another_run_fits_nothing(made: Path, tmp_path: Path) -> None:
    shutil.copy(everything(tmp_path / "other") / "run.json", made / "run.json")
    opened = Run.open(made)
    for name in ("metrics", "grad_norm"):
        with pytest.raises(DamagedError, match="it belongs to another run"):
            opened.arrow(name)
    assert len(verify(made).findings) > 8


@pytest.mark.parametrize("table", ["metrics", "grad_norm"])
@pytest.mark.parametrize(
    ("source", "part", "words"),
    [
        ("another run", 2, "it belongs to another run"),
        ("another run", 7, "it belongs to another run"),
        ("another part", 2, "it is part 1 of {table}, in the place of another"),
        ("another part", 7, "it is part 1 of {table}, in the place of another"),
        ("another table", 2, "it is part 2 of cosine_similarity, in the place of another"),
    ],
)
def test_a_foreign_part_is_refused(made: Path, tmp_path: Path, table: str, source: str, part: int, words: str) -> None:
    """Also where no line of the inventory says that it is another."""
    where = "metrics" if table == "metrics" else f"probes/{table}"
    sources = {
        "another run": lambda: everything(tmp_path / "other") / where / "part-000002.parquet",
        "another part": lambda: made / where / "part-000001.parquet",
        "another table": lambda: made / "probes/cosine_similarity/part-000001.parquet",
    }
    shutil.copy(sources[source](), made / where / f"part-{part:06d}.parquet")
    words = words.format(table=table).replace("part 2 of cosine", "part 1 of cosine")
    with pytest.raises(DamagedError, match=words):
        Run.open(made).arrow(table)
    assert any(words in finding for finding in verify(made).findings)


@pytest.mark.parametrize("source", ["another run", "another journal"])
def test_a_foreign_journal_is_not_read(
    made: Path, tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "journal-000003.records" if source == "another run" else "journal-000004.records"
    origin = everything(tmp_path / "other", 5) if source == "another run" else made
    shutil.copy(origin / "journal-000003.records", made / name)
    opened = Run.open(made)
    assert opened.metrics["step"].tolist() == ([0, 1, 2] if source == "another run" else [0, 1, 2, 3])
    assert opened.frame("grad_norm")["step"].max() == (2 if source == "another run" else 3)
    assert f"{name}: 1 record of another run or journal was left out." in caplog.text
    assert any(f"{name}: 1 record of another run or journal" in finding for finding in verify(made).findings)
    RunWriter.resume(made, part=5 if source == "another journal" else 4).close()
    assert (made / "aside/damaged" / name).exists()
    assert any("1 records of journal" in finding for finding in verify(made).findings)  # for ever


def test_a_foreign_inventory_is_said(made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(everything(tmp_path / "other") / "inventory.jsonl", made / "inventory.jsonl")
    assert steps_in(made) == 4
    assert "lines of inventory.jsonl belong to another run, so that lost parts may not show" in caplog.text
    assert "inventory.jsonl does not list part 1 of metrics, so that lost parts may not show" in caplog.text
    shutil.rmtree(made / "probes/grad_norm")
    findings = verify(made).findings
    assert any("lines of inventory.jsonl belong to another run" in finding for finding in findings)


def test_a_foreign_checkpoint_is_found(made: Path, tmp_path: Path) -> None:
    own = made / "checkpoints/step-00000003.pt"
    shutil.copy(everything(tmp_path / "other") / "checkpoints/step-00000003.pt", own)
    assert verify(made).findings == [
        f"{own} is not what was written (it belongs to another run): remove it to resume from the one before"
    ]


def test_what_another_run_gave_resumes_none(made: Path, tmp_path: Path) -> None:
    other = Run.open(everything(tmp_path / "other")).identity.run_id
    with pytest.raises(UsageError, match=r"the checkpoint belongs to another run than .*run: resume with what it gave"):
        RunWriter.resume(made, part=2, run_id=other)
    assert steps_in(made) == 4  # nothing was moved
    RunWriter.resume(made, part=2, run_id=Run.open(made).identity.run_id).close()


READS: dict[str, Callable[[Run], Any]] = {
    "run.json": lambda run: Run.open(run.path),
    "status.json": lambda run: run.status,
    "incident.json": lambda run: run.incident,
    "evaluation.json": lambda run: run.evaluation,
}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("change", ["a digit", "no checksum", "a space", "a letter of the checksum", "another id"])
def test_a_json_file_that_was_changed_is_refused(made: Path, name: str, change: str) -> None:
    """``beta1`` .9 became 2.9, and nobody noticed."""
    opened = Run.open(made)
    edit(made / name, beta1=0.9)
    READS[name](opened)
    text = (made / name).read_text()
    if change == "a digit":
        text = text.replace('"beta1": 0.9', '"beta1": 2.9')
    elif change == "no checksum":
        text = "{\n" + "\n".join(text.splitlines()[2:])
    elif change == "a space":
        text = text.replace('"beta1": 0.9', '"beta1":  0.9')
    elif change == "a letter of the checksum":
        text = text.replace('"checksum"', '"Checksum"')
    else:
        edit(made / name, run_id="0" * 32)
        text = (made / name).read_text()
    (made / name).write_text(text)
    if (name, change) == ("run.json", "another id"):
        READS[name](opened)  # which no other file has: see above
        return
    with pytest.raises(DamagedError, match=f"{name} (is damaged|belongs to another run).*: restore it from a copy"):
        READS[name](opened)
    assert any(name in finding for finding in verify(made).findings)


def test_what_somebody_changed_on_purpose_can_be_sealed(run, made: Path, tmp_path: Path) -> None:
    text = (made / "run.json").read_text()
    (made / "run.json").write_text(text.replace('"seed": 3', '"seed": 4'))
    with pytest.raises(DamagedError, match=rf"or, if somebody changed it on purpose.*verify --reseal {made}"):
        Run.open(made)
    assert run("verify", str(made))[0] == 1
    code, out, err = run("verify", "--reseal", str(made))
    assert (code, err) == (0, f"{made / 'run.json'}: has a new checksum\n")
    assert out.startswith(f"{made}: ok")
    assert Run.open(made).config["train"]["seed"] == 4
    assert (made / "run.json").read_text().splitlines()[2:] == text.replace('"seed": 3', '"seed": 4').splitlines()[2:]
    assert run("verify", "--reseal", str(made))[2] == ""  # nothing was left to do
    (made / "status.json").write_text('{"state": ')
    code, _, err = run("verify", "--reseal", str(made))
    assert (code, "status.json is no JSON file" in err) == (4, True)
    writer = new_run(tmp_path / "going", 0)
    code, _, err = run("verify", "--reseal", str(tmp_path / "going"))
    assert (code, "is being written: wait for it to end" in err) == (2, True)
    writer.close()


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    writer = new_run(tmp_path / "old", 0, 1)
    writer.incident({"step": 1, "paragraph": "Step 1: ..."}, [(1, {"loss": 1.0}, contents(1))])
    writer.seal()
    put(writer, 2, 3)
    writer.close()
    writer.set_status("finished", 4)
    write_evaluation(tmp_path / "old", {"bleu": 12.5})
    return tmp_path / "old"


@pytest.mark.parametrize("version", [2, 3])
def test_a_run_of_an_older_schema_reads_as_unchecked(
    sealed: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    as_schema(sealed, version)
    run = Run.open(sealed)
    assert (run.identity.run_id, run.manifest["schema_version"]) == ("", version)
    assert (run.status.state, run.evaluation, run.incident["step"]) == ("finished", {"bleu": 12.5}, 1)
    assert steps_in(sealed) == 4
    found = verify(sealed)
    assert found.findings == []
    assert found.unchecked == 4 + 2 + 6 * (version == 2)  # JSON files; rows of the incident; parts without an inventory
    assert not caplog.records


def test_an_older_run_that_goes_on_is_checked_from_there(sealed: Path, tmp_path: Path) -> None:
    as_schema(sealed, 3)
    with RunWriter.resume(sealed, part=3) as writer:
        writer.open(TABLES)
        put(writer, 4, 5)
    run = Run.open(sealed)
    assert (len(run.identity.run_id), run.identity.since) == (32, 3)
    assert steps_in(sealed) == 6
    assert (run.evaluation, run.incident["step"]) == ({"bleu": 12.5}, 1)
    assert (verify(sealed).findings, verify(sealed).unchecked) == ([], 2), "the rows of the incident"
    for name in JSON_FILES:
        assert json.loads((sealed / name).read_text())["run_id"] == run.identity.run_id
    part = sealed / "metrics/part-000002.parquet"  # from before, which the inventory alone knows
    other = everything(tmp_path / "other", 7)
    shutil.copy(other / "metrics/part-000002.parquet", part)
    with pytest.raises(DamagedError, match="it belongs to another run"):
        _ = run.metrics


@pytest.mark.slow
def test_a_death_while_an_older_run_becomes_one_of_today_loses_nothing(sealed: Path, tmp_path: Path) -> None:
    as_schema(sealed, 3)

    def goes_on(path: Path) -> None:
        writer = RunWriter.resume(path, part=3)
        try:
            writer.open(TABLES)
            put(writer, 4, 5)
            writer.close()
        finally:
            writer._lock.release()

    for operation in range(1000):
        path = shutil.copytree(sealed, tmp_path / f"run-{operation}")
        try:
            with dying_at(operation) as died:
                goes_on(path)
        except BaseException as error:  # the death
            assert type(error).__name__ == "Death", error  # noqa: PT017
        if not died():
            break
        assert 4 <= steps_in(path) <= 6
        assert (Run.open(path).evaluation, Run.open(path).status.step >= 3) == ({"bleu": 12.5}, True)
        goes_on(path)
        assert steps_in(path) == 6
        assert verify(path).findings == []
    assert operation > 20


def test_a_run_that_is_begun_anew_is_another_run(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    writer.set_status("failed", 0, "ZeroDivisionError")
    writer.close()
    first = Run.open(tmp_path / "run").identity
    for operation in range(100):
        path = shutil.copytree(tmp_path / "run", tmp_path / f"run-{operation}")
        try:
            with dying_at(operation) as died:
                RunWriter.create(path, {})
        except BaseException as error:
            assert type(error).__name__ == "Death", error  # noqa: PT017
        if (path / "run.json").exists():  # else it is not a run yet, and can be created
            _ = Run.open(path).status
        if not died():
            break
    assert Run.open(path).identity != first


def test_the_rows_of_an_incident_are_checked(made: Path, tmp_path: Path) -> None:
    path = made / "incident/metrics.parquet"
    data = path.read_bytes()
    for other in (
        data[:-20] + bytes([data[-20] ^ 4]) + data[-19:],
        (everything(tmp_path / "other", 5) / "incident/grad_norm.parquet").read_bytes(),
    ):
        path.write_bytes(other)
        assert verify(made).findings == [
            f"{path} is not what was written (its digest is another): restore it from a copy"
        ]
    path.unlink()
    assert verify(made).findings == [f"{path} is missing, with the rows around the incident"]


def test_a_death_while_the_rows_of_an_incident_are_written_anew_is_no_damage(made: Path, tmp_path: Path) -> None:
    facts, rows = {"step": 3, "paragraph": "..."}, [(step, {"loss": 1.0}, contents(step)) for step in (3, 4)]
    tables, own = {table.name: table for table in TABLES}, Run.open(made).identity
    for operation in range(100):
        path = shutil.copytree(made, tmp_path / f"run-{operation}")
        try:
            with dying_at(operation) as died:
                write_incident(path, facts, rows, tables, own)
        except BaseException as error:
            assert type(error).__name__ == "Death", error  # noqa: PT017
        assert verify(path).findings == []
        if not died():
            break
    assert pq.read_table(path / "incident/metrics.parquet", partitioning=None)["step"].to_pylist() == [3, 4]
    assert operation > 8


def test_an_id_is_an_id(made: Path) -> None:
    for value in ("", "x" * 32, 5, None, "A" * 32, "0" * 31):
        edit(made / "run.json", run_id=value)
        with pytest.raises(DamagedError, match="run_id is no id of a run"):
            Run.open(made)
    edit(made / "run.json", run_id="0" * 32, run_id_since=0)
    with pytest.raises(DamagedError, match="run_id_since is no number of a part"):
        Run.open(made)
    with pytest.raises(ValueError, match="are the store's own"):
        RunWriter.create(made.parent / "x", {"run_id": "0" * 32})


def test_an_inventory_line_of_odd_values_is_damage(made: Path) -> None:
    own = Run.open(made).identity.run_id
    for document in ([], {"run": own}, {"journal": "x", "run": own}, {"journal": 1e400, "run": own}):
        before = inventory.read(made, Run.open(made).identity)
        assert before is not None
        inventory._append(made, line_of(document), lasting=False)  # pyright: ignore[reportArgumentType]
        after = inventory.read(made, Run.open(made).identity)
        assert after is not None
        assert after.damaged == before.damaged + 1


def test_a_missing_inventory_is_said(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    (made / "inventory.jsonl").unlink()
    assert steps_in(made) == 4
    assert "inventory.jsonl is missing, so that lost parts would not show" in caplog.text
    with pytest.raises(InputError, match="no run"):
        Run.open(made / "nowhere")
