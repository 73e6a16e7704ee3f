"""Later passes are not looked at where the model is ours: its held-out passes write to nothing, whatever the scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rest_slow import SOME_ARCHS, rest_slow
from test_evaluations import Nobody, prepared, trained

from stabilitylab.config import parse_set, resolve
from stabilitylab.models import ARCHS
from stabilitylab.probes.state import StateSnapshot
from stabilitylab.store import AbsentRun, Run
from stabilitylab.train import Trainer, plan, start
from stabilitylab.train.loop import is_stateless


@pytest.mark.parametrize("arch", rest_slow(sorted(ARCHS), SOME_ARCHS | {"mhc"}))
def test_a_held_out_pass_writes_to_nothing(arch: str) -> None:
    small = "data.sentences=4 data.held_out=6 data.validation=8 model.d_model=16 model.d_ffn=32 data.max_length=12"
    ready = plan(resolve(parse_set([*small.split(), f"model.arch={arch}"]), depth=4))
    trainer = Trainer(ready.config, ready.dataset, AbsentRun("nowhere"), torch.device("cpu"))
    assert is_stateless(trainer.model)
    before = StateSnapshot(trainer.spread)
    with torch.no_grad():
        trainer.passes.reference()
    trainer.source()
    trainer.passes.validate()
    trainer.passes.curvature_loss()
    found = before.compare()
    assert found.tensors >= len([*trainer.model.parameters()])
    assert (found.read(), found.rebound, found.rewritten) == ([], [], [])


class Counting(torch.nn.Linear):
    """Stands for a module of somebody else's scheme."""


@pytest.mark.slow
def test_a_module_of_somebody_else_is_looked_at_in_every_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    began = StateSnapshot.__init__

    def counted(self: StateSnapshot, *given: object, **named: object) -> None:
        looks.append(1)
        began(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(StateSnapshot, "__init__", counted)
    own = trained(tmp_path / "own", steps=6)
    assert len(looks) == 1
    looks.clear()
    monkeypatch.setattr("stabilitylab.train.loop.is_stateless", lambda model: False)
    other = Run.open(start(prepared(steps=6), tmp_path / "other", "run", Nobody()).path)
    assert len(looks) > 5
    assert own.frame("model_update").equals(other.frame("model_update"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Counting(2, 2))
    assert not is_stateless(model)
    assert is_stateless(model[0])
