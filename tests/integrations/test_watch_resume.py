"""``watch(..., resume=...)`` and ``checkpoint()`` in anybody's loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import LR, batch, model

import stabilitylab as sl
from stabilitylab.errors import UsageError
from stabilitylab.integrations.session import Session


def loop(subject: Any, optimizer: Any, w: Any, steps: range) -> None:
    for step in steps:
        content: Any = batch([step])
        loss = subject(**content).loss
        loss.backward()
        w.step(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def watched(out: Path, weights: Any = None, resume: Any = None) -> tuple[Any, Any, Any]:
    subject = model()
    if weights:
        subject.load_state_dict(weights)
    optimizer, held_out = torch.optim.SGD(subject.parameters(), lr=LR), batch([30])
    w = sl.watch(
        subject, out=out, every=1, optimizer=optimizer, resume=resume, reference=lambda: subject(**held_out)
    )  # fmt: skip
    return subject, optimizer, w


def test_a_loop_that_goes_on_writes_the_rows_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    subject, optimizer, w = watched(tmp_path / "whole")
    with w:
        loop(subject, optimizer, w, range(5))
    subject, optimizer, w = watched(tmp_path / "run")
    with w:
        loop(subject, optimizer, w, range(3))
        torch.save((subject.state_dict(), w.checkpoint()), tmp_path / "checkpoint.pt")
        loop(subject, optimizer, w, range(3, 4))  # of which the resumed run knows nothing
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    subject, optimizer, w = watched(tmp_path / "run", weights, state)
    with w:
        loop(subject, optimizer, w, range(3, 5))
    whole, run = sl.Run.open(tmp_path / "whole"), sl.Run.open(tmp_path / "run")
    for table in ("metrics", *whole.tables):
        assert run.frame(table).equals(whole.frame(table)), table


def test_a_checkpoint_of_another_run_is_refused_and_one_of_before_is_taken(tmp_path: Path) -> None:
    states = {}
    for name in ("run", "other"):
        subject, optimizer, w = watched(tmp_path / name)
        with w:
            loop(subject, optimizer, w, range(2))
            states[name] = w.checkpoint()
    assert states["run"]["run"] == sl.Run.open(tmp_path / "run").identity.run_id
    with pytest.raises(UsageError, match=r"the checkpoint belongs to another run than .*run: resume with what it gave"):
        watched(tmp_path / "run", resume=states["other"])
    before = {key: value for key, value in states["run"].items() if key != "run"}
    subject, optimizer, w = watched(tmp_path / "run", resume=before)
    with w:
        loop(subject, optimizer, w, range(2, 3))
    assert sl.Run.open(tmp_path / "run").metrics["step"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [0, 7])
def test_a_run_that_begins_at_a_later_step_knows_its_frozen_parts_and_its_first_row(tmp_path: Path, step: int) -> None:
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2))
    subject = torch.nn.Sequential(*layers)
    subject[0].requires_grad_(False)
    optimizer = torch.optim.SGD(subject.parameters(), lr=LR)
    session = Session(subject, optimizer, out=tmp_path / "run", mask=None, step=step, every=1)
    for _ in range(2):
        subject(torch.ones(3, 4)).sum().backward()
        session.row()
        optimizer.step()
        optimizer.zero_grad()
    session.finish()
    run = sl.Run.open(tmp_path / "run")
    assert list(run.metrics["step"]) == [step, step + 1]
    assert run.manifest["places_untrained"] == {"0.0": "frozen"}
    assert {"row": step, "parameters": 2, "forwards": 1}.items() <= run.manifest["audit"].items()
