"""The reference Transformer as the subject of a search: its trials are those of ``probe``, number for number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rest_slow import slow

from stabilitylab.config import merge, resolve
from stabilitylab.data import load_data
from stabilitylab.lr_find.find import plan_of
from stabilitylab.lr_find.reference import reference_subject, sizes
from stabilitylab.lr_find.search import RateTrial
from stabilitylab.lr_find.trial import RateRun
from stabilitylab.store import Run, RunWriter
from stabilitylab.train.loop import Trainer

SMALL = {
    "model": {"d_model": 16, "d_ffn": 32, "heads": 2, "dropout": 0.1},
    "data": {"sentences": 4, "vocab_size": 200, "held_out": 6, "validation": 0},
    "train": {"steps": 24, "warmup": 5, "lr": 3e-3, "seed": 1, "clip_norm": 0.7},
    "probes": {"names": ("none",)},
}


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        ("rezero", {}),
        slow("subln", {"train": {"schedule": "linear", "accumulate": 2}}),
        slow("admin", {"train": {"optimizer": "radam"}}),
        slow(
            "completep",
            {"model": {"options": {"a": 0.5, "base_layers": 1}}, "train": {"weight_decay": 0.3}},
        ),
        slow("keel", {"model": {"design": "llama"}}),
    ],
)
def test_a_trial_is_the_run_of_probe(tmp_path: Path, arch: str, more: dict) -> None:
    config = resolve(merge(SMALL, {"model": {"arch": arch}, "data": {"seed": 1}}, more), depth=4)
    dataset, device = load_data(config.data, stack=config.model.stack), torch.device("cpu")
    with RunWriter.create(tmp_path / "own", {"config": config.model_dump(mode="json")}) as writer:
        trainer = Trainer(config, dataset, writer, device)
        trainer.fit(lambda: False, lambda report: None)
        trainer.watcher.close()
    own = Run.open(tmp_path / "own").metrics
    subject = reference_subject(config, dataset, device)
    plan = plan_of(subject, 24, (1,), None)
    end = RateRun(subject, plan, tmp_path, RateTrial(3e-3, 1, 24)).run()
    trial = Run.open(tmp_path / "lr0.003-s1").metrics
    if config.train.accumulate == 1:
        assert trial["loss"].equals(own["loss"])
    assert trial["loss"].to_numpy() == pytest.approx(own["loss"].to_numpy(), abs=2e-6, nan_ok=True)
    assert trial["lr"].equals(own["lr"])
    measured = trial["held_out_nll"].notna() & own["held_out_nll"].notna()
    assert measured.sum() >= 2
    assert trial["held_out_nll"][measured].to_numpy() == pytest.approx(
        own["held_out_nll"][measured].to_numpy(), abs=1e-5
    )
    assert end.marks[24].loss == pytest.approx(own["held_out_nll"].iloc[-1], abs=1e-5)
    if config.model.stack == "encoder-decoder":
        assert end.marks[24].source_worth == pytest.approx(own["source_worth"].iloc[-1], abs=1e-5)
    else:
        assert end.marks[24].source_worth is None
    assert len(end.marks[24].losses) == 6


def test_the_source_decides_at_the_horizon_alone(tmp_path: Path) -> None:
    config = resolve(merge(SMALL, {"model": {"arch": "rezero"}, "train": {"steps": 24}}), depth=2)
    dataset = load_data(config.data, stack=config.model.stack)
    subject = reference_subject(config, dataset, torch.device("cpu"))
    for horizon, eligible in ((24, False), (1000, True)):  # after 24 updates nobody reads a source
        plan = plan_of(subject, horizon, (0,), None)
        end = RateRun(subject, plan, tmp_path / str(horizon), RateTrial(3e-3, 0, 24)).run()
        worth = end.marks[24].source_worth
        assert worth is not None
        assert worth < 0.1
        assert end.marks[24].eligible is eligible


def test_another_width_keeps_the_proportions() -> None:
    config = resolve({"model": {"arch": "rezero"}}, depth=2)
    assert sizes(128, config.model) == {"d_model": 128, "d_ffn": 256, "heads": 4}
    with pytest.raises(Exception, match="width 50 does not allow"):
        sizes(50, config.model)
