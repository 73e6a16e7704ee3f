"""The recorder under Accelerate: updates replay bit for bit, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from subjects import LR, model
from test_accelerate_loop import CLIP, loop
from test_accelerate_loop import fresh_accelerate as fresh_accelerate

import stabilitylab as sl

SHAPE: dict[str, Any] = {"dtype": torch.float32, "dropout": 0.1}


def loss_fn(subject: Any, batch: dict[str, Any]) -> torch.Tensor:
    return subject(**batch).loss


def test_updates_of_a_loop_with_an_accelerator_are_replayed(tmp_path: Path) -> None:
    plain = loop(model(**SHAPE), None)
    given = sl.Recorder(loss_fn, every=2, digests=1, clip=CLIP, accumulate=2, labels="labels")
    recorded = loop(model(**SHAPE), tmp_path / "run", record=given, probes="none")
    pairs = zip(plain.parameters(), recorded.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "training differs under the recorder"
    fresh = model(**SHAPE)
    found = sl.explain(tmp_path / "run", fresh, loss_fn, torch.optim.SGD(fresh.parameters(), lr=LR))
    assert found.audit is not None
    assert (found.audit.replayed, found.audit.equal) == (3, 3), str(found)
    assert [one for one in found.findings if one.accused] == [], str(found)
