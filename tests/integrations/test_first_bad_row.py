"""On a GPU a row is journalled while the next one is computed; once a number was not finite, at its own step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stabilitylab as sl
from stabilitylab.probes import Watcher
from stabilitylab.store import Run


def test_from_the_first_bad_number_on_each_row_is_journalled_at_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decides is asked as it would be asked on a GPU; a copy of the run is what ``kill -9`` would leave."""
    monkeypatch.setattr(Watcher, "_reads_at_once", lambda self: self.incident is not None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    last = []
    with sl.watch(model, out=tmp_path / "run", every=1, probes="grad_norm") as w:
        for step in range(6):
            model.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            w.step(loss=float("nan") if step == 2 else 1.0)
            last.append(Run.open(tmp_path / "run").metrics["step"].max())
    assert last[1:] == [0, 1, 3, 4, 5]  # row 2, the first that is not finite, is there with row 3
