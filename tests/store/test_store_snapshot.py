"""A snapshot of a run: every table as of one moment, whatever its writer does while it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_cases import GRAD_NORM, SIMILARITY, TABLES, cells, new_run, put

from stabilitylab.errors import DamagedError, InputError
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter, pieces
from stabilitylab.store.pieces import ReplacedError
from stabilitylab.store.reader import of_snapshots


def steps(run: Run, name: str) -> list[int]:
    return sorted({*run.frame(name)["step"].tolist()})


def all_steps(run: Run) -> tuple[list[int], list[int], list[int]]:
    return steps(run, "metrics"), steps(run, "grad_norm"), steps(run, "cosine_similarity")


def test_a_snapshot_stands_still_while_the_run_goes_on(tmp_path: Path) -> None:
    """Rows are appended, parts are made, and a metric comes for which the first part is written anew."""
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 2, 3)
    run = Run.open(tmp_path / "run")
    now = run.snapshot()
    expected = ([0, 1, 2, 3], [0, 1, 2, 3], [0, 3])
    assert all_steps(now) == expected
    put(writer, 4)
    writer.seal()
    put(writer, 5, 6)
    writer.record(later=True)
    writer.ledger([{"step": 6, "kind": "setting"}])
    writer.close()
    writer.set_status("finished", 7)
    assert all_steps(now) == expected
    assert (now.ledger, len(run.ledger)) == ([], 1)
    assert "late" not in now.metrics
    assert "later" not in now.manifest
    assert (now.status.state, now.status.step) == ("running", 3)
    assert all_steps(run) == ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6], [0, 3, 6])
    after = run.snapshot()
    assert all_steps(after) == all_steps(run)
    assert (after.status.state, after.status.step, after.manifest["later"]) == ("finished", 7, True)
    assert after.snapshot() is after


def test_the_numbers_of_a_snapshot_are_those_of_the_run(tmp_path: Path) -> None:
    """Of a part, of a journal that is read from disk, and of one that was read at once."""
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 2, 3)
    for alive in (True, False):
        if not alive:
            writer._lock.release()
        now = Run.open(tmp_path / "run").snapshot()
        found = now.frame("grad_norm")
        for step in range(4):
            own, at = cells(GRAD_NORM, step), found[found["step"] == step]
            np.testing.assert_array_equal(at["absent"], own.absent)
            np.testing.assert_array_equal(at["value"][~own.absent], own.values[~own.absent, 0])
        assert now.status.state == ("running" if alive else "interrupted")


def test_a_part_that_is_made_while_the_snapshot_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal was listed and becomes parts before it is read, or after; what comes behind it is left out."""
    writer = new_run(tmp_path / "run", 0, 1)
    original = pieces.read_records
    raced: list[Path] = []

    def before(path: Path, *run: Any):
        if not raced:
            raced.append(path)
            writer.seal()
            put(writer, 2)
            writer.seal()
        return original(path, *run)

    def after(path: Path, *run: Any):
        found = original(path, *run)
        if len(raced) < 2:
            raced.append(path)
            put(writer, 4)
            writer.seal()
            put(writer, 5)
            writer.seal()
            put(writer, 6)
        return found

    monkeypatch.setattr(pieces, "read_records", before)
    assert all_steps(Run.open(tmp_path / "run").snapshot()) == ([0, 1, 2], [0, 1, 2], [0])
    monkeypatch.setattr(pieces, "read_records", after)
    put(writer, 3)
    assert all_steps(Run.open(tmp_path / "run").snapshot()) == ([0, 1, 2, 3], [0, 1, 2, 3], [0, 3])
    assert len(raced) == 2
    writer.close()


def test_a_part_of_some_tables_is_no_part_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer stands between the part of one table and that of the next."""
    writer = new_run(tmp_path / "run", 0)
    writer.seal()
    put(writer, 1, 2, 3)
    journal = next((tmp_path / "run").glob("journal-*"))
    kept = journal.read_bytes()
    writer.seal()
    journal.write_bytes(kept)
    (tmp_path / "run" / "metrics" / "part-000002.parquet").unlink()
    (tmp_path / "run" / "probes" / "cosine_similarity" / "part-000002.parquet").unlink()
    now = Run.open(tmp_path / "run").snapshot()
    assert all_steps(now) == ([0, 1, 2, 3], [0, 1, 2, 3], [0, 3])
    assert now.settled  # type: ignore[attr-defined]
    writer.close()


def test_a_run_that_is_resumed_while_it_is_read_is_read_once_more(tmp_path: Path) -> None:
    """What was recorded after the checkpoint moves aside, and other rows come under its name."""
    writer = new_run(tmp_path / "run", 0, 1)
    part = writer.seal()
    put(writer, 2, 3)
    writer.close()
    now = Run.open(tmp_path / "run").snapshot()
    assert steps(now, "metrics") == [0, 1, 2, 3]
    read: list[tuple[list[int], list[int]]] = []

    def make(run: Run) -> tuple[list[int], list[int]]:
        first = steps(run, "metrics")
        if not read:
            read.append((first, first))
            with RunWriter.resume(tmp_path / "run", part) as again:
                again.open(TABLES)
                put(again, 2)
        return first, steps(run, "grad_norm")

    assert of_snapshots(make, Run.open(tmp_path / "run")) == ([0, 1, 2], [0, 1, 2])
    assert read == [([0, 1, 2, 3], [0, 1, 2, 3])]
    with pytest.raises(
        ReplacedError, match=r"part-000002\.parquet was replaced while .*run was read: read the run again"
    ):
        now.frame("grad_norm")
    with pytest.raises(ReplacedError):
        of_snapshots(lambda run: run.frame("grad_norm"), now)  # whoever took it takes another
    assert isinstance(ReplacedError("", tmp_path), InputError)


def test_a_killed_run_whose_journal_another_attempt_moves_aside(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    writer._lock.release()
    now = Run.open(tmp_path / "run").snapshot()
    assert steps(now, "grad_norm") == [0, 1]
    again = RunWriter.resume(tmp_path / "run", 1)
    with pytest.raises(ReplacedError):
        now.frame("grad_norm")
    again.open(TABLES)
    put(again, 0)
    with pytest.raises(ReplacedError):  # a journal of the same name
        now.frame("grad_norm")
    again.close()


def test_a_snapshot_is_taken_once_more_where_a_resume_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the parts after the checkpoint one is aside, and the inventory has none of them any more."""
    folder = tmp_path / "run"
    writer = new_run(folder, 0)
    writer.seal()
    for step in (3, 6):
        put(writer, step)
        writer.seal()
    lines = (folder / "inventory.jsonl").read_text().splitlines(keepends=True)
    (folder / "inventory.jsonl").write_text("".join(line for line in lines if '"part": 1,' in line))
    (folder / "metrics" / "part-000002.parquet").unlink()
    waited: list[float] = []

    def finish(seconds: float) -> None:
        waited.append(seconds)
        for path in (*folder.rglob("part-000002.parquet"), *folder.rglob("part-000003.parquet")):
            path.unlink()

    monkeypatch.setattr("stabilitylab.store.reader.time.sleep", finish)
    assert all_steps(Run.open(folder).snapshot()) == ([0], [0], [0])
    assert len(waited) == 1
    writer._lock.release()


def test_tables_that_are_declared_anew_while_the_snapshot_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first row they may get other rows, once the model has shown its places."""
    writer = new_run(tmp_path / "run")
    run = Run.open(tmp_path / "run")
    original = pieces.journals
    raced: list[Path] = []
    wider = Table("grad_norm", ("value",), (Row("a"), Row("b"), Row("c")))

    def race(path: Path):
        if not raced:
            raced.append(path)
            writer.open([wider])
            writer.append(0, {}, {"grad_norm": Cells(np.ones((3, 1)), np.zeros(3, bool))})
        return original(path)

    monkeypatch.setattr(pieces, "journals", race)
    now = run.snapshot()
    assert now.table("grad_norm").rows == wider.rows
    assert len(now.frame("grad_norm")) == 3
    writer.close()


def test_what_is_damaged_is_said_by_what_asks_for_it(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 0, 3).close()
    folder = tmp_path / "run"
    (folder / "status.json").unlink()
    (folder / "incident.json").write_text("{")
    (folder / "probes" / "cosine_similarity" / "foreign").write_text("")
    now = Run.open(folder).snapshot()
    assert steps(now, "grad_norm") == [0, 3]
    for asked in (lambda: now.status, lambda: now.incident, lambda: now.frame("cosine_similarity")):
        for _ in range(2):
            with pytest.raises(DamagedError):
                asked()


def test_files_that_keep_vanishing_end_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(tmp_path / "run", 0).close()
    run = Run.open(tmp_path / "run")

    def gone(path: Path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(pieces, "_stamp", gone)
    with pytest.raises(InputError, match="keep vanishing while they are read"):
        run.snapshot()


def test_a_table_without_rows_and_one_that_the_run_has_not(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 1)
    now = Run.open(tmp_path / "run").snapshot()
    assert now.frame("cosine_similarity").empty
    assert now.table("cosine_similarity") == SIMILARITY
    with pytest.raises(InputError, match="has no table 'ln_input'"):
        now.frame("ln_input")
    writer.close()
