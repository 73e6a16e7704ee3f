"""A thinned copy of a run: it reads and verifies as a run, with fewer rows of the probes' tables and no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from store_cases import GRAD_NORM, SIMILARITY, new_run, put

from stabilitylab.store import Run, thinned
from stabilitylab.store.verify import verify


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An ended run of twelve rows in two parts, with a checkpoint."""
    path = tmp_path / "run"
    with new_run(path, *range(7)) as writer:
        writer.seal()
        put(writer, *range(7, 12))
    writer.set_status("finished", 12)
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "step-00000012.pt").write_bytes(b"weights")
    return path


def copied(run: Path, to: Path, keep: Callable[[int], bool] | None = None) -> Run:
    for within, data in thinned(run, keep):
        (to / within).parent.mkdir(parents=True, exist_ok=True)
        (to / within).write_bytes(data)
    return Run.open(to)


def test_a_copy_has_the_rows_that_are_kept_and_the_last_of_each_part(run: Path, tmp_path: Path) -> None:
    whole, fewer = Run.open(run), copied(run, tmp_path / "copy", lambda step: step % 4 == 0)
    pd.testing.assert_frame_equal(fewer.metrics, whole.metrics)
    for table, steps in ((GRAD_NORM, (0, 4, 6, 8, 11)), (SIMILARITY, (0, 6, 9))):
        own = whole.frame(table.name)
        expected = own[own["step"].isin(steps)].reset_index(drop=True)
        pd.testing.assert_frame_equal(fewer.frame(table.name), expected)
    assert verify(fewer.path).findings == []
    assert not (fewer.path / "checkpoints").exists()


def test_without_a_choice_every_file_but_the_weights_is_copied(run: Path, tmp_path: Path) -> None:
    copy = copied(run, tmp_path / "copy")
    files = {path.relative_to(copy.path): path.read_bytes() for path in copy.path.rglob("*") if path.is_file()}
    kept = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "checkpoints"]
    expected = {path.relative_to(run): path.read_bytes() for path in kept if not path.name.startswith(".")}
    lists = [sorted(own.pop(Path("inventory.jsonl")).splitlines()) for own in (files, expected)]
    assert files == expected
    assert lists[0] == lists[1], "the same lines, in another order"
    assert verify(copy.path).findings == []


def test_a_copy_with_the_inventory_of_the_whole_run_is_damaged(run: Path, tmp_path: Path) -> None:
    copy = copied(run, tmp_path / "copy", lambda step: step == 0)
    (copy.path / "inventory.jsonl").write_bytes((run / "inventory.jsonl").read_bytes())
    assert verify(copy.path).findings
