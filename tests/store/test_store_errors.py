"""What is wrong with a run directory, or with the disk below it, is said in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from edited_runs import edit
from store_cases import GRAD_NORM, SIMILARITY, TABLES, cells, contents, full_device, metrics, new_run, put, steps_in

from stabilitylab.errors import DamagedError, InputError, ResourceError, StabilityLabError, UsageError
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import SCHEMA_VERSION, Run, RunWriter
from stabilitylab.store.files import replace_file
from stabilitylab.store.journal import Journal


def one_sentence(error: StabilityLabError) -> bool:
    return "\n" not in str(error) and str(error).endswith(".")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 2, 3)
    writer.close()
    return tmp_path / "run"


def test_a_file_that_could_not_be_written_gives_its_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left on device") as caught:
        replace_file(tmp_path / "state.json", b"new" * 1000)
    assert one_sentence(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert (tmp_path / "state.json").read_bytes() == b"old"


def test_a_missing_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run at .*nowhere") as caught:
        Run.open(tmp_path / "nowhere")
    assert one_sentence(caught.value)


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run directory: it has no run\.json") as caught:
        Run.open(tmp_path)
    assert one_sentence(caught.value)
    with pytest.raises(InputError, match="is not a run directory"):
        RunWriter.resume(tmp_path, part=1)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    for name in ("one", "two"):
        new_run(tmp_path / name, 0).close()
    with pytest.raises(InputError, match=r"is not a run directory: it holds 2 runs, such as .*one: name one") as caught:
        Run.open(tmp_path)
    assert one_sentence(caught.value)


def test_a_newer_schema(run: Path) -> None:
    edit(run / "run.json", schema_version=SCHEMA_VERSION + 1)
    for reader in (Run.open, lambda path: RunWriter.resume(path, part=1)):
        with pytest.raises(InputError, match=r"newer stabilitylab \(schema 5, this one reads 4\): upgrade") as caught:
            reader(run)
        assert one_sentence(caught.value)


@pytest.mark.parametrize("text", [b"", b'{"schema_version": 1,', b"\xff\xfe", b"[]", b"{}", b'{"schema_version": "1"}'])
def test_a_damaged_run_json(run: Path, text: bytes) -> None:
    (run / "run.json").write_bytes(text)
    with pytest.raises(InputError, match=r"run\.json is damaged .*restore it from a copy") as caught:
        Run.open(run)
    assert one_sentence(caught.value)


@pytest.mark.parametrize("changes", [{"tables": []}, {"tables": {"a": {}}}, {"attempts": ...}, {"tables": {"a": 3}}])
def test_a_run_json_with_entries_of_another_kind(run: Path, changes: dict) -> None:
    edit(run / "run.json", **changes)
    with pytest.raises(InputError, match=r"run\.json is damaged"):
        Run.open(run)


def test_a_damaged_or_missing_status(run: Path) -> None:
    edit(run / "status.json", state=...)
    with pytest.raises(InputError, match=r"status\.json is damaged \(KeyError\('state'\)\)"):
        _ = Run.open(run).status
    edit(run / "status.json", state="running", step="many")
    with pytest.raises(InputError, match=r"status\.json is damaged"):
        _ = Run.open(run).status
    (run / "status.json").unlink()
    with pytest.raises(InputError, match=r"status\.json is missing"):
        _ = Run.open(run).status


@pytest.mark.parametrize("table", ["metrics", "grad_norm"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_part(run: Path, table: str, share: float) -> None:
    part = (run / "metrics" if table == "metrics" else run / "probes" / table) / "part-000002.parquet"
    part.write_bytes(part.read_bytes()[: int(share * part.stat().st_size)])
    with pytest.raises(InputError, match=r"part-000002\.parquet is damaged .*restore it from a copy") as caught:
        Run.open(run).frame(table)
    assert one_sentence(caught.value)
    part.unlink()  # the advice works
    assert Run.open(run).frame(table)["step"].max() == 1


def test_another_tables_part_is_not_taken_for_ones_own(run: Path) -> None:
    other = run / "metrics" / "part-000001.parquet"
    (run / "probes" / "grad_norm" / "part-000003.parquet").write_bytes(other.read_bytes())
    with pytest.raises(InputError, match=r"part-000003\.parquet is damaged or not part of the run"):
        Run.open(run).frame("grad_norm")


def test_rows_that_do_not_fit_their_definition_are_refused(run: Path) -> None:
    with RunWriter.resume(run, part=3) as writer:
        writer.open(TABLES)
        put(writer, 4)
    document = json.loads((run / "run.json").read_text())
    for labels in document["tables"]["grad_norm"]["rows"].values():
        labels.append(labels[-1])
    edit(run / "run.json", **document)
    with pytest.raises(InputError, match="half a step of 'grad_norm'"):
        Run.open(run).frame("grad_norm")
    journal = Journal(run / "journal-000004.records", TABLES, Run.open(run).identity, 4)
    journal.append(5, metrics(5), contents(5))
    journal.release()
    with pytest.raises(InputError, match=r"a journal of .* does not fit run\.json's table 'grad_norm'"):
        Run.open(run).frame("grad_norm")


def test_a_foreign_file_is_named_and_a_hidden_one_passed_over(run: Path) -> None:
    folder = run / "probes" / "grad_norm"
    (folder / ".DS_Store").write_text("")
    assert steps_in(run) == 4
    (folder / "x.parquet.tmp").write_text("")
    with pytest.raises(InputError, match=r"holds 'x\.parquet\.tmp', which is not part of the run") as caught:
        Run.open(run).frame("grad_norm")
    assert one_sentence(caught.value)
    with pytest.raises(InputError, match=r"x\.parquet\.tmp"):
        RunWriter.resume(run, part=2)
    (folder / "x.parquet.tmp").unlink()
    RunWriter.resume(run, part=2).close()


def test_files_that_may_not_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    opened = Run.open(run)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(InputError, match=r"cannot read .*Permission denied.*check its permissions") as caught:
            opened.frame("grad_norm")
        assert one_sentence(caught.value)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"cannot read .*run\.json"):
        Run.open(run)


def test_an_existing_run_is_never_overwritten(run: Path) -> None:
    with pytest.raises(UsageError, match=r"exists already .*give another name, or delete it if nothing") as caught:
        RunWriter.create(run, {})
    assert one_sentence(caught.value)
    assert steps_in(run) == 4


@pytest.mark.parametrize(
    ("kind", "checkpoint", "advice"),
    [
        ("train", True, "wanted, or continue the run with probe --resume "),
        ("train", False, "name, or delete it if nothing in it is wanted."),
        ("watched", True, "wanted, or continue the run with watch(resume=...) and what its checkpoint() gave."),
    ],
)
def test_what_may_be_done_about_a_run_in_the_way(run: Path, kind: str, checkpoint: bool, advice: str) -> None:
    edit(run / "run.json", kind=kind)
    if checkpoint:
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "step-00000002.pt").touch()
    with pytest.raises(UsageError) as caught:
        RunWriter.create(run, {})
    assert advice in str(caught.value)
    assert ("--resume" in str(caught.value)) is (kind == "train" and checkpoint)


def test_a_run_that_ended_before_its_first_row_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = new_run(path)
    with pytest.raises(UsageError, match="exists already"):  # it lives, and may record its first row any moment
        RunWriter.create(path, {})
    writer.set_status("failed", 0, "ZeroDivisionError")
    writer.close()
    with RunWriter.create(path, {"label": "second"}) as second:
        second.open(TABLES)
        put(second, 0)
    assert Run.open(path).manifest["label"] == "second"
    assert steps_in(path) == 1
    with pytest.raises(UsageError, match="exists already"):
        RunWriter.create(path, {})


@pytest.mark.parametrize("what", ["checkpoint", "note", "lost part", "journal", "foreign", "damaged"])
def test_a_run_without_rows_that_holds_anything_else_stays(what: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = new_run(path, *(() if what != "lost part" else (0,)))
    writer.close()
    if what == "checkpoint":
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "step-00000000.pt").touch()
    elif what == "note":
        (path / "notes.txt").write_text("mine")
    elif what == "lost part":  # its line in the inventory is there
        shutil.rmtree(path / "metrics")
        shutil.rmtree(path / "probes")
    elif what == "journal":
        (path / "journal-000001.records").write_bytes(b"half a record")
    else:
        (path / "run.json").write_text('{"mine": 1}' if what == "foreign" else "{")
    before = (path / "run.json").read_text()
    with pytest.raises(UsageError, match="exists already"):
        RunWriter.create(path, {})
    assert (path / "run.json").read_text() == before


def test_other_things_in_the_way_stay_untouched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(UsageError, match="exists already"):
            RunWriter.create(tmp_path / name, {})
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "thesis.tex").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    new_run(tmp_path / "empty", 0).close()
    assert steps_in(tmp_path / "empty") == 1


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot write .*Not a directory.*choose another folder") as caught:
        RunWriter.create(tmp_path / "file" / "run", {})
    assert one_sentence(caught.value)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(ResourceError, match=r"cannot write .*No such file or directory.*choose another folder"):
        RunWriter.create(Path("/proc/nothing/run"), {})
    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(ResourceError, match=r"cannot write .*Read-only file system.*choose another folder"):
        RunWriter.create(tmp_path / "run", {})


def test_a_run_that_became_read_only_can_still_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def read_only(path: object, flags: int, *rest: object, **kwargs: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ResourceError, match="Read-only file system"):
        RunWriter.resume(run, part=2)
    assert Run.open(run).status.state == "interrupted"
    assert steps_in(run) == 4


def test_a_full_device_refuses_a_status_and_keeps_the_old_one(run: Path) -> None:
    writer = RunWriter.resume(run, part=3)
    told = r"cannot write .*status\.json \(No space left on device\)"
    with full_device("status.json"), pytest.raises(ResourceError, match=told) as caught:
        writer.set_status("finished", 3)
    assert one_sentence(caught.value)
    assert Run.open(run).status.state == "running"
    writer.set_status("finished", 3)  # the failed attempt was cleared away
    assert Run.open(run).status.state == "finished"
    writer.close()


@pytest.mark.slow
def test_a_file_size_limit_of_the_shell_costs_no_recorded_step(tmp_path: Path) -> None:
    """``ulimit -f``: a refusal by the kernel, in a real process, of which nothing was patched."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from store_cases import new_run, put
writer = new_run(Path({str(tmp_path / "run")!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for step in range(1000):
    try:
        put(writer, step)
    except Exception as error:
        print(step, type(error).__name__, error)
        break
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, kind, text = done.stdout.split(" ", 2)
    assert kind == "ResourceError"
    assert "File too large" in text
    assert steps_in(tmp_path / "run") == int(count) > 5


def test_two_writers_on_one_run(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0)
    with pytest.raises(UsageError, match="is being written by another process") as caught:
        RunWriter.resume(tmp_path / "run", part=1)
    assert one_sentence(caught.value)
    put(writer, 1)
    writer.close()
    assert steps_in(tmp_path / "run") == 2
    RunWriter.resume(tmp_path / "run", part=2).close()


def test_a_file_system_without_locks_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    new_run(tmp_path / "run", 0).close()
    assert Run.open(tmp_path / "run").status.state == "running"  # nobody can tell: believe what was written
    assert steps_in(tmp_path / "run") == 1


def test_a_checkpoint_whose_parts_are_gone(run: Path) -> None:
    (run / "metrics" / "part-000001.parquet").unlink()
    with pytest.raises(InputError, match="lacks part 1, which comes before its checkpoint") as caught:
        RunWriter.resume(run, part=3)
    assert one_sentence(caught.value)
    assert (run / "metrics" / "part-000002.parquet").exists()


@pytest.mark.parametrize(
    "table",
    [
        Table("../x", ("value",), (Row("a"),)),
        Table("", ("value",), (Row("a"),)),
        Table("metrics", ("value",), (Row("a"),)),
        Table("empty", ("value",), ()),
        Table("narrow", (), (Row("a"),)),
        Table("clash", ("absent",), (Row("a"),)),
    ],
)
def test_tables_that_cannot_be_stored(tmp_path: Path, table: Table) -> None:
    writer = RunWriter.create(tmp_path / "run", {})
    with pytest.raises(UsageError, match=r"cannot name a table|needs rows and columns"):
        writer.open([table])
    writer.close()
    assert Run.open(tmp_path / "run").tables == ()


def test_a_resume_with_other_rows_is_refused(run: Path) -> None:
    writer = RunWriter.resume(run, part=3)
    with pytest.raises(UsageError, match="'grad_norm' with other rows or columns: resume with the same model"):
        writer.open([Table("grad_norm", GRAD_NORM.columns, GRAD_NORM.rows[1:])])
    writer.open([SIMILARITY])
    writer.close()
    assert steps_in(run) == 4


def test_misuse_by_a_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['tables'\] in run\.json are the store's own"):
        RunWriter.create(tmp_path / "run", {"tables": {}})
    assert not (tmp_path / "run").exists()
    writer = new_run(tmp_path / "run", 0)
    with pytest.raises(ValueError, match="step 0 comes after step 0"):
        put(writer, 0)
    with pytest.raises(ValueError, match="unknown state 'happy'"):
        writer.set_status("happy", 0)
    with pytest.raises(ValueError, match=r"'ln_input'.* not given to open"):
        writer.append(1, {}, {"ln_input": cells(GRAD_NORM, 1)})
    with pytest.raises(ValueError, match=r"has 5 rows and 2 columns; got values \(4, 2\), absent \(5,\)"):
        writer.append(1, {}, {"grad_norm": Cells(np.zeros((4, 2)), np.zeros(5, bool))})
    with pytest.raises(ValueError, match="own"):
        writer.record(attempts=[])
    put(writer, 1)
    writer.close()
    assert steps_in(tmp_path / "run") == 2
    resumed = RunWriter.resume(tmp_path / "run", part=2)
    resumed.open(TABLES)
    with pytest.raises(DamagedError, match="has rows up to step 1, but its checkpoint goes on at step 1"):
        put(resumed, 1)  # as if the parts were those of another attempt
    put(resumed, 2)
    with pytest.raises(ValueError, match="step 2 comes after step 2"):
        put(resumed, 2)
    resumed.close()
    with pytest.raises(ValueError, match="was closed: resume it to append"):
        put(resumed, 2)
