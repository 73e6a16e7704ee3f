"""The process dies before, or in the middle of, every single change that the store makes on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_cases import TABLES, new_run, put, steps_in

from stabilitylab.store import RunWriter

CHANGES = ("write", "replace", "unlink", "mkdir")
HARMLESS = ("open", "fsync", "ftruncate")  # a death just before them is a death just after the change before
END = 8


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies leaves its writes to the kernel: fsync changes nothing here, except how long it takes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Death(BaseException):
    """The process is gone: from here on, none of its file operations happens."""


@contextmanager
def dying_at(operation: int) -> Iterator[Callable[[], bool]]:
    """Die at the given change of the disk, a write after half of its bytes; yields whether that has happened."""
    left, dead = operation, False

    def wrap(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal left, dead
            left -= name in CHANGES
            if left < 0:
                if name == "write" and not dead:
                    descriptor, data = args
                    original(descriptor, memoryview(data)[: len(data) // 2])
                dead = True
                raise Death
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES + HARMLESS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield lambda: dead


def first_attempt(path: Path, done: list[int], checkpoints: list[tuple[int, int]]) -> None:
    """Two sealed parts and a closed third; ``checkpoints`` holds (next part, next step)."""
    writer = RunWriter.create(path, {})
    checkpoints.append((1, 0))
    try:
        writer.open(TABLES)
        for step in range(END):
            if step in (2, 6):
                checkpoints.append((writer.seal(), step))
            put(writer, step)
            done.append(step)
        writer.close()
    finally:
        writer._lock.release()  # the kernel's part in a death


def second_attempt(path: Path, part: int, step: int) -> None:
    writer = RunWriter.resume(path, part)
    try:
        writer.open(TABLES)
        put(writer, *range(step, END))
        writer.close()
    finally:
        writer._lock.release()


@pytest.mark.slow
def test_a_death_at_any_file_operation_loses_and_doubles_nothing(tmp_path: Path) -> None:
    for operation in range(1000):
        path, done, checkpoints = tmp_path / f"run-{operation}", [], []
        try:
            with dying_at(operation) as died:
                first_attempt(path, done, checkpoints)
        except Death:
            pass
        if not died():
            break
        if not checkpoints:  # died in create()
            assert not done
            continue
        assert len(done) <= steps_in(path) <= len(done) + 1
        second_attempt(path, *checkpoints[-1])
        assert steps_in(path) == END
        assert not list(path.glob("journal-*"))
        assert not list(path.rglob(".part-*"))
    assert operation > 40
    assert steps_in(path) == END


def test_a_run_that_died_before_it_began_can_be_created_again(tmp_path: Path) -> None:
    for operation in range(1000):
        path = tmp_path / f"run-{operation}"
        try:
            with dying_at(operation) as died:
                RunWriter.create(path, {})
        except Death:
            pass
        if (path / "run.json").exists():
            break
        assert died()
        new_run(path, 0, 1).close()
        assert steps_in(path) == 2
    assert operation > 2


@pytest.mark.slow
@pytest.mark.parametrize("seen", [3, 7], ids=["journal", "parts"])
def test_a_death_while_resuming_leaves_a_run_that_resumes(tmp_path: Path, seen: int) -> None:
    """Journals and parts after the checkpoint (part 2, step 2) move aside one by one, and any may be the last."""
    writer = new_run(tmp_path / "origin", 0, 1)
    assert writer.seal() == 2
    put(writer, *range(2, seen))
    if seen > 4:
        writer.seal()
        put(writer, seen)
    writer._lock.release()
    for operation in range(1000):
        path = shutil.copytree(tmp_path / "origin", tmp_path / f"run-{operation}")
        try:
            with dying_at(operation) as died:
                second_attempt(path, part=2, step=2)
        except Death:
            pass
        if not died():
            break
        second_attempt(path, part=2, step=2)
        assert steps_in(path) == END
    assert operation > 15
    assert steps_in(path) == END
    moved = [file for file in (path / "aside" / "attempt-1").rglob("*") if file.is_file()]
    assert len(moved) == (4 if seen > 4 else 1)
