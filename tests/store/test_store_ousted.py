"""A writer whose lock, directory or place is gone notices and stops, and no row of either of two writers is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from store_cases import TABLES, contents, metrics, new_run, put, steps_in

from stabilitylab.errors import ResourceError
from stabilitylab.store import Run, RunWriter


def test_a_deleted_lock_is_noticed_at_the_next_row(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    (tmp_path / "run/.lock").unlink()
    with pytest.raises(ResourceError, match=r"the lock of .*run was removed.*recorded is safe.*--resume") as at:
        put(writer, 2)
    assert "\n" not in str(at.value)
    with pytest.raises(ResourceError, match="the lock of"):
        writer.set_status("failed", 2)
    with pytest.raises(ResourceError, match="the lock of"):
        writer.close()
    assert steps_in(tmp_path / "run") == 2


def test_of_two_writers_the_first_stops_and_both_kept_all_rows(tmp_path: Path) -> None:
    first = new_run(tmp_path / "run", 0, 1)
    part = first.seal()
    put(first, 2, 3)
    (tmp_path / "run/.lock").unlink()
    second = RunWriter.resume(tmp_path / "run", part)
    second.open(TABLES)
    put(second, 2)
    for act in (lambda: put(first, 4), first.seal, lambda: first.record(x=1), first.close):
        with pytest.raises(ResourceError, match="the lock of"):
            act()
    put(second, 3, 4)
    second.close()
    assert steps_in(tmp_path / "run") == 5
    aside = tmp_path / "run/aside/attempt-1/journal-000002.records"
    shutil.copytree(tmp_path / "run", tmp_path / "first")
    for path in (tmp_path / "first").rglob("part-000002.parquet"):
        path.unlink()
    shutil.copy(aside, tmp_path / "first/journal-000002.records")
    assert Run.open(tmp_path / "first").metrics["step"].tolist() == [0, 1, 2, 3]


def test_a_moved_run_is_noticed_and_not_made_anew_where_it_was(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    for act in (lambda: put(writer, 2), writer.seal, lambda: writer.set_status("failed", 2), writer.close):
        with pytest.raises(ResourceError, match="was moved or removed while it was written"):
            act()
    assert not (tmp_path / "run").exists()
    assert steps_in(tmp_path / "elsewhere") == 2
    with pytest.raises(ResourceError, match="was moved"):  # also the status that may follow close()
        writer.set_status("finished", 2)
    assert not (tmp_path / "run").exists()


def test_nothing_aside_is_overwritten(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 0, 1)._lock.release()
    for name in ("attempt-1", "attempt-1-2"):
        (tmp_path / "run/aside" / name).mkdir(parents=True)
        (tmp_path / "run/aside" / name / "journal-000001.records").write_text("another's")
    RunWriter.resume(tmp_path / "run", part=1).close()
    kept = sorted((tmp_path / "run/aside").rglob("journal-*"))
    assert [path.parent.name for path in kept] == ["attempt-1", "attempt-1-2", "attempt-1-3"]


def test_what_was_begun_is_there_and_its_rest_follows(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    known = {"cosine_similarity": contents(3)["cosine_similarity"]}
    put(writer, 2)
    writer.begin(3, {"loss": 6.0}, known)
    run = Run.open(tmp_path / "run")
    assert run.metrics["step"].tolist() == [0, 1, 2, 3]
    assert run.frame("cosine_similarity")["step"].max() == 3
    assert run.frame("grad_norm")["step"].max() == 2
    writer.append(3, metrics(3), contents(3))
    put(writer, 4)
    assert steps_in(tmp_path / "run") == 5
    writer.begin(5, metrics(5), contents(5))
    writer.append(5, metrics(5), contents(5))  # nothing is left to be said
    writer.begin(6, {"loss": 12.0}, {})
    writer.close()  # the process ends in between
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_row_is_never_split_over_two_parts(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    writer.journal_limit = 1
    for step in range(5):
        writer.begin(step, {"loss": metrics(step)["loss"]}, {})
        writer.append(step, metrics(step), contents(step))
    assert steps_in(tmp_path / "run") == 5
    writer.begin(5, {"loss": 10.0}, {})
    writer.seal()
    writer.append(5, metrics(5), contents(5))  # it was sealed as it was known
    put(writer, 6)
    writer.close()
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == list(range(7))


def test_misuse(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0)
    with pytest.raises(ValueError, match="step 0 comes after step 0"):
        writer.begin(0, {}, {})
    with pytest.raises(ValueError, match="give it a name of one printable line"):
        writer.append(1, {"a\nb": 1.0}, {})
    writer.close()
