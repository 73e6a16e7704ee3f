"""The model of a run has the loss that the run recorded last; data that have changed are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from edited_runs import edit
from torch.nn.functional import cross_entropy

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import InputError
from stabilitylab.store import Run
from stabilitylab.train import load_model, plan, resume, start

SETTINGS = (
    "model.arch=branchnorm model.T=9 model.d_model=16 model.d_ffn=16 model.heads=2 model.dropout=0.1 train.steps=5 "
    "train.lr=1e-2 train.warmup=2 data.sentences=4 data.held_out=6 data.vocab_size=64 probes.names=['none']"
)


def loss(run: Run) -> float:
    """The loss of the loaded model on the held-out batch [nats/token]."""
    model, dataset, row = load_model(run)
    assert not model.training, "the model is in evaluation mode"
    assert row == run.status.step
    batch = dataset.held_out
    with torch.no_grad():
        logits = model(**batch.inputs)
    each = cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    return float((each * batch.weight).sum() / batch.weight.sum())


def test_the_loaded_model_has_the_loss_that_the_run_recorded(tmp_path: Path) -> None:
    path = start(plan(resolve(parse_set(SETTINGS.split()), depth=2)), tmp_path, "run").path
    first = Run.open(path).metrics["held_out_nll"].iloc[-1]
    assert loss(Run.open(path)) == pytest.approx(first, rel=1e-6)
    resume(path, 8)
    last = Run.open(path).metrics["held_out_nll"].iloc[-1]
    assert last != pytest.approx(first, rel=1e-4)
    assert loss(Run.open(path)) == pytest.approx(last, rel=1e-6)
    document = json.loads((path / "run.json").read_text(encoding="utf-8"))
    document["data"]["held_out_sha256"] = "other"
    edit(path / "run.json", document)
    with pytest.raises(InputError, match="have changed since it was trained: restore them"):
        load_model(Run.open(path))
