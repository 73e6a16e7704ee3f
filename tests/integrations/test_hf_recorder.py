"""The recorder under the Trainer of Hugging Face: batches are the model's arguments, and updates replay bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import model
from test_hf_trainer import train

import stabilitylab as sl
from stabilitylab.integrations.transformers import HuggingFaceCallback


def loss_fn(subject: Any, batch: dict[str, Any]) -> torch.Tensor:
    return subject(**batch).loss


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_of_the_trainer_are_replayed_bit_for_bit(tmp_path: Path, accumulate: int) -> None:
    settings: dict[str, Any] = {
        "optim": "adamw_torch",
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "gradient_accumulation_steps": accumulate,
        "max_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    shape: dict[str, Any] = {"dtype": torch.float32, "dropout": 0.1}
    plain = train(model(**shape), tmp_path / "a", **settings)
    given = sl.Recorder(loss_fn, every=2, digests=1, clip=0.5, labels="labels", masks="attention_mask")
    callback = HuggingFaceCallback(tmp_path / "run", probes="none", record=given, strict=True)
    recorded = train(model(**shape), tmp_path / "b", callback, **settings)
    pairs = zip(plain.model.parameters(), recorded.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "training differs under the recorder"
    fresh = model(**shape)
    found = sl.explain(tmp_path / "run", fresh, loss_fn, torch.optim.AdamW(fresh.parameters()))
    assert found.audit is not None
    assert (found.audit.replayed, found.audit.equal) == (5, 5), str(found)
    assert [one for one in found.findings if one.accused] == [], str(found)
    assert any("rounded to less than float64" in why for why in found.unchecked), "this loss is taken in float32"
