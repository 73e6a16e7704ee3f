"""What is asked for, what it takes, and the memory that the allocator hands out for it."""

from __future__ import annotations

import gc
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from forecast_cases import CPU, config_of
from torch.profiler import ProfilerActivity, profile

from stabilitylab.config import parse_set, resolve
from stabilitylab.data import load_data
from stabilitylab.errors import ResourceError, UsageError
from stabilitylab.forecast import Ask, Estimate, measure, measuring, planning, reference, trials, wanted
from stabilitylab.forecast.planning import bytes_of
from stabilitylab.models import ARCHS
from stabilitylab.train.footprint import PROCESS, estimate


def test_all_architectures_are_asked_for_with_their_recipes_and_shape() -> None:
    configs, notes = wanted(Ask(36, 512, (), {"train": {"lr": 1e-3}}))
    assert [c.model.arch for c in configs] == [*ARCHS]
    assert notes == []
    assert {(c.model.d_model, c.model.d_ffn, c.model.heads, c.train.lr) for c in configs} == {(512, 2048, 8, 1e-3)}
    assert {c.train.warmup for c in configs if c.model.arch == "tfixup"} == {0}
    assert {(c.model.encoder_layers, c.model.decoder_layers) for c in configs} == {(18, 18)}
    single, notes = wanted(Ask(12, given=parse_set(["model.stack=decoder"])))
    assert len(single) == len(ARCHS) - 1
    assert notes == ["tfixup is not defined for a single decoder, and is left out."]
    assert [c.model.arch for c in wanted(Ask(12, archs=["Post-LN", "postln"]))[0]] == ["postln"]


@pytest.mark.parametrize(
    ("width", "shape"), [(64, (128, 2)), (256, (1024, 4)), (512, (2048, 8)), (384, (1536, 6)), (100, (400, 1))]
)
def test_a_width_brings_its_blocks_and_heads(width: int, shape: tuple[int, int]) -> None:
    sizes = planning.shape(width)
    assert (sizes["d_model"], sizes["d_ffn"], sizes["heads"]) == (width, *shape)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Ask(12, archs=["nonesuch"]), "unknown architecture 'nonesuch'; choose one of"),
        (Ask(13), "--depth 13 is odd"),
        (Ask(0), "--depth 0 is out of range"),
        (Ask(12, archs=["tfixup"], given={"model": {"stack": "encoder"}}), "is not defined for --stack encoder"),
        (Ask(12, given={"model": {"arch": "preln"}}), "name architectures with --arch"),
        (Ask(12, 63), "must be even"),
    ],
)
def test_what_cannot_be_asked_for_is_one_sentence(ask: Ask, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wanted(ask)


def test_what_does_not_fit_is_refused() -> None:
    planning.check(Estimate(10, 2**20, 1.0, 1), torch.device("cpu"))
    with pytest.raises(ResourceError, match=r"about 1048576\.0 GiB \(10 parameters\) .*: give a smaller --depth"):
        planning.check(Estimate(10, 2**50, 1.0, 1), torch.device("cpu"))


def test_time_is_extended_from_one_and_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("preln", model={"encoder_layers": 5, "decoder_layers": 9})
    monkeypatch.setattr(planning, "_fastest", lambda config, layers, n, *rest: 0.5 + 0.25 * n)
    assert planning.update_seconds(config, None, torch.device("cpu")) == 0.5 + 0.25 * 9  # type: ignore[arg-type]
    assert "3 models of 5 parameters: at most about 1 minute, 1.0 GiB" in Estimate(5, 2**30, 20.0, 3).sentence()
    assert "at most about 2.0 hours" in Estimate(5, 2**30, 2 * 3600.0, 3).sentence()


@pytest.mark.parametrize(("arch", "sentences"), [("branchnorm", 2), ("rezero", 2), ("resi-dual", 12)])
def test_the_estimate_of_memory_is_a_close_upper_bound(
    arch: str, sentences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two sentences the weights decide, with twelve the activations. Without the part that is the same for all."""
    monkeypatch.setattr(measuring, "UPDATES", 3)
    monkeypatch.setattr(trials, "UPDATES", 5)
    model = {"arch": arch, "d_model": 128, "d_ffn": 512, "heads": 2}
    data = {"sentences": sentences, "held_out": 2, "vocab_size": 100}
    config = resolve({"model": model, "data": data}, depth=10)
    dataset = load_data(config.data, stack="encoder-decoder")
    gc.collect()  # or what other tests left would be freed while this one is recorded
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        measure(reference(config, dataset, CPU))
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in sorted(trace, key=at) if event["name"] == "[memory]"]
    peak = max(accumulate(sizes))
    need = estimate(config, dataset, CPU)
    said = bytes_of(need) - PROCESS
    assert 0.7 * said < peak < said, (peak / need.parameters, need)


def at(event: dict[str, Any]) -> float:
    return event.get("ts", 0.0)
