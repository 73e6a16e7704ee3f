"""The journal: odd numbers, torn tails, short writes, full disks."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rest_slow import rest_slow
from store_cases import full_device, new_run, put, steps_in

from stabilitylab.errors import ResourceError
from stabilitylab.schema import Cells, Row, Table
from stabilitylab.store import Run, RunWriter

ODD = st.sampled_from([0.0, -0.0, 1e-300, 5e-324, 1.7e308, float("nan"), float("inf"), -float("inf")]) | st.floats()


def bits(values: list[float | None]) -> list[bytes | None]:
    """Bit for bit, except that all NaN are one."""
    return [None if v is None else b"nan" if v != v else struct.pack("d", v) for v in values]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(ODD, ODD, st.booleans()), min_size=1, max_size=6),
    loss=st.lists(ODD | st.none(), min_size=2, max_size=2),
    sealed=st.booleans(),
)
def test_every_number_comes_back_and_absent_is_not_nan(rows, loss, sealed) -> None:
    table = Table("odd", ("a", "b"), tuple(Row(f"site.{i}") for i in range(len(rows))))
    values, absent = np.array([row[:2] for row in rows]), np.array([row[2] for row in rows])
    with tempfile.TemporaryDirectory() as folder, RunWriter.create(Path(folder) / "run", {}) as writer:
        writer.open([table])
        for step in (0, 1):
            writer.append(step, {"loss": loss[step]}, {"odd": Cells(values, absent)})
            if sealed:
                writer.seal()
        run = Run.open(writer.path)
        stored, frame, kept = run.arrow("odd"), run.frame("odd"), run.arrow("metrics")
    for index, name in enumerate(table.columns):
        expected = [None if gone else row[index] for *row, gone in rows] * 2
        assert bits(stored[name].to_pylist()) == bits(expected)
        assert bits(frame[name].tolist()) == bits([float("nan") if v is None else v for v in expected])
    assert frame["absent"].tolist() == absent.tolist() * 2
    assert bits(kept["loss"].to_pylist()) == bits(loss)


@pytest.mark.parametrize("apart", rest_slow([1, 16], [16]))
def test_a_tail_torn_at_any_byte_costs_the_last_step_only(tmp_path: Path, apart: int) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    journal = tmp_path / "run" / "journal-000001.records"
    two = journal.stat().st_size
    put(writer, 2)
    three, run = journal.read_bytes(), Run.open(tmp_path / "run")
    for length in range(two, len(three), apart):
        journal.write_bytes(three[:length])
        assert len(run.metrics) == 2, length
    assert steps_in(tmp_path / "run") == 2
    journal.write_bytes(three)
    assert steps_in(tmp_path / "run") == 3
    writer.close()


@pytest.mark.slow
def test_a_first_record_torn_anywhere_is_an_empty_run(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0)
    journal = tmp_path / "run" / "journal-000001.records"
    one, run = journal.read_bytes(), Run.open(tmp_path / "run")
    for length in range(0, len(one), 3):
        journal.write_bytes(one[:length])
        assert run.frame("grad_norm").empty, length
    assert steps_in(tmp_path / "run") == 0
    journal.write_bytes(one)
    writer.close()
    assert steps_in(tmp_path / "run") == 1


def test_a_power_cut_that_left_zeros_is_a_torn_tail(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    journal = tmp_path / "run" / "journal-000001.records"
    journal.write_bytes(journal.read_bytes() + bytes(4096))
    assert steps_in(tmp_path / "run") == 2
    writer.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, memoryview(data)[:1000]))
    new_run(tmp_path / "run", *range(6)).close()
    assert steps_in(tmp_path / "run") == 6


def test_a_full_disk_takes_no_step_back_and_leaves_no_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_run(tmp_path / "run", 0, 1)
    write, room = os.write, 500

    def until_full(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, memoryview(data)[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", until_full)
        with pytest.raises(ResourceError, match=r"No space left.*recorded before is safe; free some space.*--resume"):
            put(writer, 2)
        assert steps_in(tmp_path / "run") == 2
        with pytest.raises(ResourceError, match="No space left"):
            writer.close()
    assert steps_in(tmp_path / "run") == 2
    writer = RunWriter.resume(tmp_path / "run", part=2)
    writer.open(())
    writer.close()
    assert steps_in(tmp_path / "run") == 2
    assert not list((tmp_path / "run").glob("journal-*"))


def test_after_a_full_disk_the_same_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = new_run(tmp_path / "run")
    for step in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(ResourceError):
                put(writer, step)
            if step:
                with pytest.raises(ResourceError):
                    writer.seal()
        put(writer, step)
    assert steps_in(tmp_path / "run") == 4
    writer.close()
    assert steps_in(tmp_path / "run") == 4


def test_a_device_that_is_really_full_refuses_a_part_and_keeps_the_journal(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run", 0, 1, 2, 3)
    with full_device("part-000001.parquet"), pytest.raises(ResourceError, match="No space left"):
        writer.seal()
    assert (tmp_path / "run" / "journal-000001.records").exists()
    assert steps_in(tmp_path / "run") == 4
    assert writer.seal() == 2
    assert steps_in(tmp_path / "run") == 4
    writer.close()


def test_the_journal_is_compacted_at_its_limit(tmp_path: Path) -> None:
    writer = new_run(tmp_path / "run")
    writer.journal_limit = 1
    put(writer, *range(5))
    assert len(list((tmp_path / "run" / "metrics").glob("part-*"))) == 4
    assert len(list((tmp_path / "run").glob("journal-*"))) == 1
    assert steps_in(tmp_path / "run") == 5
    writer.close()
    assert steps_in(tmp_path / "run") == 5
