"""An incident of rows that a resumed run makes anew is not the run's any more; an earlier one stays."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from store_cases import TABLES, contents, new_run, put
from test_store_crash import dying_at

from stabilitylab.store import Run, RunWriter
from stabilitylab.store.nonfinite import lost
from stabilitylab.store.verify import verify

AT = 3


def broken(path: Path, checkpoint: int) -> int:
    """Record six steps with an incident at step 3, and die; return the part that a checkpoint after ``checkpoint``
    steps stores."""
    writer, part = new_run(path), 0
    for step in range(6):
        if step == checkpoint:
            part = writer.seal()
        put(writer, step)
        if step == AT:
            rows = [(AT, {"loss": math.nan}, contents(AT))]
            writer.incident({"step": AT, "paragraph": f"Step {AT}: the loss is NaN."}, rows)
    writer._lock.release()
    return part


def go_on(path: Path, part: int, step: int) -> Run:
    with RunWriter.resume(path, part) as writer:
        writer.open(TABLES)
        put(writer, *range(step, 8))
        writer.set_status("finished", 8)
    return Run.open(path)


@pytest.mark.parametrize("checkpoint", [1, AT])
def test_an_incident_after_the_checkpoint_moves_aside(checkpoint, tmp_path: Path) -> None:
    part = broken(tmp_path / "run", checkpoint)
    assert lost(Run.open(tmp_path / "run")) == f"Step {AT}: the loss is NaN"
    run = go_on(tmp_path / "run", part, checkpoint)
    assert (run.incident, lost(run)) == (None, "")
    assert {path.name for path in run.path.glob("incident*")} == set()
    kept = {path.name for path in run.path.glob("aside/attempt-1/incident*")}
    assert kept == {"incident", "incident.json"}, "nothing is deleted"
    assert (verify(run.path).findings, verify(run.path).unchecked) == ([], 0)


def test_an_incident_before_the_checkpoint_stays(tmp_path: Path) -> None:
    part = broken(tmp_path / "run", AT + 1)
    run = go_on(tmp_path / "run", part, AT + 1)
    assert run.incident == {"step": AT, "paragraph": f"Step {AT}: the loss is NaN."}
    assert (run.path / "incident/metrics.parquet").is_file()
    assert verify(run.path).findings == []


def test_a_damaged_incident_stays_to_be_restored(tmp_path: Path) -> None:
    part = broken(tmp_path / "run", 1)
    (tmp_path / "run/incident.json").write_text("{")
    go_on(tmp_path / "run", part, 1)
    assert (tmp_path / "run/incident.json").read_text() == "{"


def test_a_death_while_it_moves_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    part = broken(tmp_path / "made", 1)
    for operation in range(100):
        path = shutil.copytree(tmp_path / "made", tmp_path / f"run-{operation}")
        try:
            with dying_at(operation) as died:
                RunWriter.resume(path, part)._lock.release()
        except BaseException as error:
            assert type(error).__name__ == "Death", error  # noqa: PT017
        run = go_on(path, part, 1)
        assert (run.incident, lost(run), verify(path).findings) == (None, "", [])
        assert not (path / "incident").exists()
        if not died():
            break
    assert operation > 8
