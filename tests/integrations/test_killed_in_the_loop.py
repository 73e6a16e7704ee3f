"""``kill -9`` right after ``w.step()`` returned: the row that people want is the one before the crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stabilitylab as sl
from stabilitylab.store import Run

LOOP = """
import os, signal, sys, torch
import stabilitylab as sl
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with sl.watch(model, out=sys.argv[1], every=1, optimizer=optimizer, reference=lambda: model(torch.ones(1, 2))) as w:
    for step in range(5):
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        w.step(loss=loss, lr=0.1)
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_row_just_stepped_is_readable(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOP, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = Run.open(tmp_path / "run")
    assert (run.status.state, run.status.step) == ("interrupted", 3)
    assert run.metrics["step"].tolist() == [0, 1, 2, 3]
    assert run.metrics["loss"].notna().all()
    assert run.metrics["lr"].tolist() == [0.1] * 4
    assert run.frame("grad_norm")["step"].max() == 3
    assert run.frame("ln_input")["step"].max() == 3
    assert run.frame("update_ratio")["step"].max() == 2  # of an update that never came


def test_a_whole_run_is_the_same_as_ever(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sl.watch(model, out=tmp_path / "run", every=2, optimizer=optimizer, reference=None) as w:
        for _ in range(5):
            model(torch.ones(1, 2)).square().sum().backward()
            w.step(loss=1.0)
            optimizer.step()
            w.note(after=2.0)
            optimizer.zero_grad()
    run = Run.open(tmp_path / "run")
    assert run.metrics["step"].tolist() == [0, 1, 2, 3, 4]
    assert run.metrics["after"].tolist() == [2.0] * 5
    assert run.frame("update_ratio")["step"].unique().tolist() == [0, 2, 4]


def test_an_error_between_step_and_update_keeps_the_row(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), sl.watch(model, out=tmp_path / "run", every=1) as w:  # noqa: PT012
        model(torch.ones(1, 2)).square().sum().backward()
        w.step(loss=float("nan"))
        _ = 1 / 0
    assert Run.open(tmp_path / "run").metrics["step"].tolist() == [0]
    assert os.listdir(tmp_path / "run/metrics") == ["part-000001.parquet"]
