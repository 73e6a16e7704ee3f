"""A report that is interrupted leaves no half page, no process and no semaphore behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_report_command import some_runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "group"),
    [(signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)],
    ids=["by a scheduler", "by Ctrl-C"],
)
def test_an_interrupted_report(tmp_path: Path, number: int, code: int, group: bool) -> None:
    some_runs(tmp_path / "runs")
    out = tmp_path / "report"
    out.mkdir()
    (out / "index.html").write_text("the page of before")
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "stabilitylab", "report", "runs"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not any(out.glob("figures/*.csv")):  # the first figure is being printed, by other processes
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    for _ in range(3):  # a scheduler says it several times
        (os.killpg if group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "leaked" not in err
    assert "Traceback" not in err
    assert f"stopped by {signal.Signals(number).name}" in err
    assert (out / "index.html").read_text() == "the page of before"
    assert not list(out.rglob(".*"))
    assert all(json.loads(path.read_text()) for path in out.glob("claims.json"))
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
