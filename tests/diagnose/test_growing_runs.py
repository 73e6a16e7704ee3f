"""A run is diagnosed, compared, exported, listed and shown while another process writes it, seals it and resumes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rest_slow import EVERY

from stabilitylab.alarm.reading import rows
from stabilitylab.commands.listing import run_table
from stabilitylab.diagnose import compare, diagnose, side_by_side
from stabilitylab.export import export
from stabilitylab.reports.page import live
from stabilitylab.store import Run
from stabilitylab.store.reader import of_snapshots

ROOT = Path(__file__).resolve().parents[2]
PAGES = int(os.environ.get("PAGES", "6"))
WRITER = ROOT / "tests" / "store" / "growing_writer.py"


@contextmanager
def grown(path: Path, attempt: float) -> Iterator[Path]:
    """A run that grows until the test ends, and is resumed every ``attempt`` seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WRITER), str(path), str(attempt)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield path
            assert process.poll() is None, "the writer ended before the test did"
        finally:
            process.kill()


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Path]:
    with grown(tmp_path / "runs" / "growing", 3.0) as path:
        yield path


def consistent(now: Run) -> int:
    """Reads every table of a snapshot, one after the other; returns its last step. A table that waits for the update
    may lack the last row, whose record is in two parts; no other may."""
    metrics = now.metrics["step"].tolist()
    assert metrics == list(range(len(metrics)))
    for name in now.tables:
        steps = np.unique(now.frame(name)["step"].to_numpy()).tolist()
        late = now.table(name).phase == "update"
        assert steps == metrics or (late and steps == metrics[:-1]), (name, len(steps), len(metrics))
        column = now.table(name).columns[-1]
        assert len(now.frame(name, columns=[column])) == len(steps) * len(now.table(name).rows)
    assert now.status.state in ("running", "interrupted")  # for an instant, between two attempts, nobody writes
    assert now.status.step == max(metrics)
    return max(metrics)


@pytest.mark.slow
def test_every_table_of_a_snapshot_ends_at_one_row(growing: Path) -> None:
    seen = {of_snapshots(consistent, Run.open(growing)) for _ in range(12)}
    assert len(seen) > 3, "the run did not grow"


@pytest.mark.slow
def test_a_growing_run_is_diagnosed(growing: Path) -> None:
    for _ in range(6):
        found = diagnose(Run.open(growing))
        assert found.verdict != "failure", found.paragraph


@pytest.mark.slow
def test_whatever_else_reads_a_growing_run(growing: Path, tmp_path: Path) -> None:
    both = Run.open(growing), Run.open(growing)
    assert compare(*both).last_common is not None
    assert len(side_by_side(both).rows) == 2
    assert run_table(growing.parent)[0]["state"] in ("running", "interrupted")
    read = list(rows(both[0]))
    assert [step for step, _, _ in read] == list(range(len(read)))
    for to in ("csv", "parquet", "latex"):
        assert export(both[0], to, tmp_path / to).files
    page, going = live.write([growing.parent], tmp_path / "report", 1.0)
    assert going in (0, 1)
    assert "Not readable" not in page.read_text()


@pytest.mark.slow
def test_a_growing_run_is_diagnosed_again_and_again(growing: Path, run) -> None:
    """``EVERY=1`` diagnoses it 200 times, over some 25 attempts of the writer."""
    for _ in range(200 if EVERY else 50):
        code, out, err = run("diagnose", str(growing), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["verdict"] != "failure"


@pytest.mark.slow
@pytest.mark.timeout(60 * PAGES)
def test_the_page_of_a_growing_run_is_written_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``report --watch``, without the rest between two pages; resumed less often than a page takes. Every page reads
    a longer run than the one before it; ``PAGES=200`` writes as many as were once written by hand."""
    monkeypatch.setattr(live, "SHARE", 0)
    told: list[str] = []

    class Enough(Exception):
        """So many pages were written."""

    def hear(sentence: str) -> None:
        told.append(sentence)
        page = (tmp_path / "report" / "index.html").read_text()
        assert "Not readable" not in page
        assert "because of an error" not in page
        if len(told) == PAGES:
            raise Enough

    with grown(tmp_path / "runs" / "growing", 60.0) as growing, pytest.raises(Enough):
        live.watch([growing.parent], tmp_path / "report", 0.0, told=hear)
    assert all("going" in sentence for sentence in told)
