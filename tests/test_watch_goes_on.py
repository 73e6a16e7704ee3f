"""Nothing that the record of a training meets ends the training: a full disk, a folder that is gone, an odd step."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_toys import Toy, batch, loss_of

from stabilitylab import watch
from stabilitylab.store import Run
from stabilitylab.store.verify import verify


class Full:
    """A disk that is full from now on: ``Full(monkeypatch)``; ``free()`` makes room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.write = os.write
        monkeypatch.setattr(os, "write", self._refuse)

    def _refuse(self, descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free(self) -> None:
        self._patch.setattr(os, "write", self.write)


@pytest.mark.parametrize("freed", [False, True])
def test_a_full_disk_ends_the_record_and_not_the_training(
    freed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, losses = Toy(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, out=tmp_path / "run", every=1, probes="grad_norm", optimizer=optimizer, reference=None) as w:
        for t in range(6):
            if t == 3:
                disk = Full(monkeypatch)
            loss = loss_of(model, batch(t))
            loss.backward()
            w.step(loss=loss)
            losses.append(float(loss.detach()))
            optimizer.step(), optimizer.zero_grad()
        if freed:
            disk.free()
    disk.free()
    assert len(losses) == 6
    (told,) = [record.message for record in caplog.records if "Nothing more is recorded" in record.message]
    assert "No space left on device" in told
    assert told.endswith("what was recorded before is safe. Nothing more is recorded; the training goes on.")
    run = Run.open(tmp_path / "run")
    assert run.metrics["loss"].tolist()[:2] == losses[:2]
    assert len(run.metrics) in (2, 3)
    if freed:
        assert run.status.state == "interrupted"
        assert "nothing more was recorded: cannot write" in run.status.reason
    assert verify(tmp_path / "run").findings == []


def test_a_full_disk_hides_no_error_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        with watch(Toy(), out=tmp_path / "run", reference=None):
            Full(monkeypatch)
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        loop()


def test_a_run_that_was_removed_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    with watch(model, out=tmp_path / "run", every=1, probes="grad_norm", reference=None) as w:
        for t in range(3):
            loss_of(model, batch(t)).backward()
            w.step()
            if t == 0:
                shutil.rmtree(tmp_path / "run")
        assert w.checkpoint()["part"] == 1
    assert "was moved or removed while it was written" in caplog.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [64, torch.tensor(0.5)])
def test_a_step_that_takes_no_closure_gets_what_it_is_given(given: Any, tmp_path: Path) -> None:
    """As those of Sophia (a number of tokens) and of Polyak's rate (the loss)."""

    class Taking(torch.optim.SGD):
        seen: Any = None

        def step(self, what: Any = None) -> None:  # type: ignore[override]
            self.seen = what

    model = Toy()
    optimizer = Taking(model.parameters(), lr=0.1)
    with watch(model, out=tmp_path / "run", optimizer=optimizer, reference=None) as w:
        loss_of(model, batch(0)).backward()
        w.step()
        optimizer.step(given)
    assert optimizer.seen is given
