"""Sweeps whose parent or worker is killed, two on one folder, a failing run: status truthful, nothing made twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stabilitylab.store import Run
from stabilitylab.store.verify import verify

GRID = "sweep --grid arch=postln,preln depth=2 --out . --jobs 1 -q --retries 0"
SET = "train.steps=400 data.sentences=4 data.held_out=6 train.checkpoint_every=20 probes.names=['none']"
NAMES = ("postln-2-s0", "preln-2-s0")


def sweep(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stabilitylab", *GRID.split(), *more]
    for setting in SET.split():
        command += ["--set", setting]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, cwd=folder, env=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds, what: str) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


@pytest.mark.slow
def test_parent_killed_worker_killed_and_two_on_one_folder(tmp_path: Path) -> None:
    first = sweep(tmp_path)
    begun = tmp_path / NAMES[0] / "checkpoints"
    until(lambda: begun.is_dir() and any(begun.glob("step-*.pt")), "the first run has a checkpoint")
    orphan = worker_of(first)
    first.kill()  # the parent; its worker goes on, as the status says
    first.communicate()
    assert orphan.is_running()
    assert Run.open(tmp_path / NAMES[0]).status.state == "running"
    orphan.suspend()
    second = sweep(tmp_path)
    out, err = second.communicate(timeout=240)
    assert (second.returncode, "1 finished, 1 running" in out) == (1, True), (out, err)  # something remains
    orphan.send_signal(signal.SIGKILL)
    orphan.wait(60)
    until(lambda: Run.open(tmp_path / NAMES[0]).status.state == "interrupted", "the worker is gone")
    status = sweep(tmp_path, "--status")
    assert "the process was killed, or its machine was lost" in status.communicate(timeout=120)[0]
    third = sweep(tmp_path)
    until(lambda: len(Run.open(tmp_path / NAMES[0]).manifest["attempts"]) == 2, "it goes on")
    worker_of(third).kill()  # a worker; its parent says so
    out, err = third.communicate(timeout=240)
    assert (third.returncode, "1 finished, 1 failed" in out) == (1, True), (out, err)
    last = sweep(tmp_path)
    out, err = last.communicate(timeout=240)
    assert (last.returncode, "2 runs: 2 finished" in out) == (0, True), (out, err)
    for name in NAMES:
        run = Run.open(tmp_path / name)
        assert run.status.state == "finished"
        assert run.metrics["step"].tolist() == list(range(401))
        assert verify(tmp_path / name).findings == []
    assert len(Run.open(tmp_path / NAMES[1]).manifest["attempts"]) == 1  # made once


@pytest.mark.slow
def test_two_sweeps_at_once_make_each_run_once(tmp_path: Path) -> None:
    both = [sweep(tmp_path), sweep(tmp_path)]
    ends = [(one.communicate(timeout=280), one.returncode) for one in both]
    assert {code for _, code in ends} <= {0, 1}, ends
    last = sweep(tmp_path)
    out, err = last.communicate(timeout=240)
    assert (last.returncode, "2 runs: 2 finished" in out) == (0, True), (out, err)
    for name in NAMES:
        run = Run.open(tmp_path / name)
        assert run.metrics["step"].tolist() == list(range(401))
        assert verify(tmp_path / name).findings == []
    assert not (tmp_path / "sweep/aside").exists()


@pytest.mark.slow
def test_a_failing_run_in_the_grid_is_said_and_the_others_are_made(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).mkdir()
    (tmp_path / NAMES[0] / "notes.txt").write_text("mine")
    one = sweep(tmp_path)
    out, err = one.communicate(timeout=240)
    assert one.returncode == 4
    assert "holds files but no run" in err
    (tmp_path / NAMES[0] / "notes.txt").unlink()
    (tmp_path / NAMES[0]).rmdir()
    one = sweep(tmp_path, "--set", "train.lr=1e30", "--set", "train.warmup=0")  # diverges, which is an end
    out, err = one.communicate(timeout=240)
    assert (one.returncode, "2 finished" in out) == (0, True), (out, err)
