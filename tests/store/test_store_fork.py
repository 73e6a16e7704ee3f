"""A run has one writer in one process: its forks record nothing, end nothing and keep no lock."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from forking import fork, in_a_fork
from store_cases import TABLES, new_run, put, steps_in

import stabilitylab as sl
from stabilitylab.probes import Watcher
from stabilitylab.schema import Cells
from stabilitylab.store import Run, RunWriter
from stabilitylab.store.files import is_locked
from stabilitylab.store.verify import verify


def test_a_fork_that_exits_leaves_the_run_alone(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", *range(10))
    said = in_a_fork(
        lambda: writer.__exit__(None, None, None), writer.close, lambda: writer.set_status("finished", 10, "the fork")
    )
    assert said == ["", "", ""]
    assert Run.open(tmp_path / "run").status.state == "running"
    assert (tmp_path / "run/journal-000001.records").exists()
    put(writer, *range(10, 20))
    writer.close()
    assert steps_in(tmp_path / "run") == 20
    assert verify(tmp_path / "run").findings == []


def test_a_fork_that_records_is_told_so(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0)
    said = in_a_fork(
        lambda: put(writer, 1),
        lambda: writer.begin(1, {}, {}),
        writer.seal,
        writer.flush,
        lambda: writer.open(TABLES),
        lambda: writer.record(note="mine"),
        lambda: writer.incident({"step": 0}, []),
    )
    sentence = f"UsageError: {tmp_path / 'run'} is written by process {os.getpid()}, of which this is a fork: "
    assert {one.partition("record in")[0] for one in said} == {sentence}
    put(writer, 1)
    writer.close()
    assert steps_in(tmp_path / "run") == 2
    assert "note" not in Run.open(tmp_path / "run").manifest


def test_a_fork_keeps_no_lock_after_its_parent(tmp_path: Path) -> None:
    """A worker that outlives the killed trainer must not keep the run from being resumed."""
    told, tell = os.pipe()
    if not (trainer := fork()):
        new_run(tmp_path / "run", 0, 1)
        if not (worker := fork()):
            time.sleep(60)
            os._exit(0)
        os.write(tell, str(worker).encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(told, 20))
    assert is_locked(tmp_path / "run")
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    try:
        os.kill(worker, 0)  # it lives
        assert not is_locked(tmp_path / "run")
        RunWriter.resume(tmp_path / "run", part=2).close()
    finally:
        os.kill(worker, signal.SIGKILL)
    assert steps_in(tmp_path / "run") == 2


def test_a_fork_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0)
    said = in_a_fork(lambda: RunWriter.resume(tmp_path / "run", part=2))
    assert "is being written by another process" in said[0]
    assert is_locked(tmp_path / "run")
    put(writer, 1)
    writer.close()
    assert not is_locked(tmp_path / "run")


def test_a_fork_leaves_a_watched_run_alone(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.closed, self.rows = 0, 0

        def open(self, tables: object) -> None: ...

        def append(self, step: int, metrics: object, tables: dict[str, Cells]) -> None:
            self.rows += 1

        def close(self) -> None:
            self.closed += 1

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    other = Sink()
    plain = Watcher(model, other, probes=["ln_input"], parallel="off")
    with sl.watch(model, out=tmp_path / "run", probes=["ln_input"], every=1, reference=None, parallel="off") as w:

        def update() -> None:
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            w.step(loss=loss)

        def ends() -> None:
            with w:
                raise SystemExit

        def ends_the_other() -> None:
            with plain:
                plain.step()
                assert other.rows == 0, "it waits for the next step"
            assert (other.rows, other.closed) == (0, 0), (other.rows, other.closed)

        update()
        update()
        assert in_a_fork(ends, w.close, ends_the_other) == ["SystemExit: ", "", ""]
        assert Run.open(tmp_path / "run").status.state == "running"
        update()
    plain.close()
    assert other.closed == 1
    assert Run.open(tmp_path / "run").status.state == "finished"
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["removed", "replaced", "replaced by a folder", "linked away"])
def test_a_journal_that_vanished_is_noticed_and_written_again(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = new_run(tmp_path / "run", *range(4))
    path = tmp_path / "run/journal-000001.records"
    if how == "linked away":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").unlink()
    else:
        path.unlink()
    if how == "replaced":
        other = new_run(tmp_path / "other", 7, 8)
        path.write_bytes((tmp_path / "other/journal-000001.records").read_bytes())
        other.close()
    elif how == "replaced by a folder":
        path.mkdir()
    put(writer, 4)
    said = "was removed" if how == "removed" else "was replaced by another file"
    assert f"{path} {said} while it was written: none of its records is lost." in caplog.text
    assert steps_in(tmp_path / "run") == 5
    writer.close()
    assert steps_in(tmp_path / "run") == 5
    assert verify(tmp_path / "run").findings == []
    kept = [*(tmp_path / "run/aside").rglob("*.records")] if how != "removed" else []
    assert len(kept) == (how != "removed")


@pytest.mark.parametrize("when", ["seal", "close", "flush"])
def test_a_journal_that_vanished_after_the_last_row_is_noticed_too(tmp_path: Path, when: str) -> None:
    writer = new_run(tmp_path / "run", *range(4))
    (tmp_path / "run/journal-000001.records").unlink()
    getattr(writer, when)()
    assert steps_in(tmp_path / "run") == 4
    writer.close()
    assert verify(tmp_path / "run").findings == []


@pytest.mark.parametrize("left", [0, 1, 2.5], ids=["nothing", "one record", "two records and a half"])
def test_what_was_cut_off_a_journal_is_counted_and_said_ever_after(
    tmp_path: Path, left: float, caplog: pytest.LogCaptureFixture
) -> None:
    writer = new_run(tmp_path / "run")
    path, ends = tmp_path / "run/journal-000001.records", [0]
    for step in range(5):
        put(writer, step)
        ends.append(path.stat().st_size)
    whole = int(left)
    os.truncate(path, ends[whole] + (left > whole) * 100)
    put(writer, 5)
    assert f"while it was written: {5 - whole} of its 5 records are lost." in caplog.text
    put(writer, 6)
    expected = [*range(whole), 5, 6]
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == expected
    part = writer.seal()
    put(writer, 7)
    writer.close()
    for _ in ("journal", "part", "after a resume"):
        assert Run.open(tmp_path / "run").metrics["step"].tolist() == [*expected, 7]
        finding = f"{5 - whole} records of journal 1 are not in its part: they were damaged, cut off or another run's"
        assert finding in verify(tmp_path / "run").findings
        assert finding in caplog.text
        RunWriter.resume(tmp_path / "run", part + 1).close()


def test_a_journal_that_was_emptied_before_a_checkpoint_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    os.truncate(tmp_path / "run/journal-000001.records", 0)
    part = writer.seal()
    writer._lock.release()
    with RunWriter.resume(tmp_path / "run", part) as writer:
        writer.open(TABLES)
        put(writer, 2)
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [2]
    assert any("2 records of journal 1" in finding for finding in verify(tmp_path / "run").findings)


def test_a_journal_that_grew_behind_the_writer_costs_nothing(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    path = tmp_path / "run/journal-000001.records"
    other = new_run(tmp_path / "other", 5)
    foreign = (tmp_path / "other/journal-000001.records").read_bytes()
    other.close()
    with path.open("ab") as file:
        file.write(path.read_bytes() + foreign)  # its own rows a second time, and another's
    put(writer, 2)
    assert steps_in(tmp_path / "run") == 3
    writer.close()
    assert steps_in(tmp_path / "run") == 3


def test_the_loss_of_a_journal_that_was_not_compacted_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    writer.seal()
    put(writer, 2)
    writer._lock.release()
    (tmp_path / "run/journal-000002.records").unlink()
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [0, 1]
    assert "journal-000002.records is missing, with rows that no part holds" in caplog.text
    assert any("journal-000002.records is missing" in finding for finding in verify(tmp_path / "run").findings)
