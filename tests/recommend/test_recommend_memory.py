"""The memory that a measurement is said to take is what the allocator hands out."""

from __future__ import annotations

import gc
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from recommend_cases import CPU
from torch.profiler import ProfilerActivity, profile

from stabilitylab.config import resolve
from stabilitylab.data import load_data
from stabilitylab.probes.library import adam
from stabilitylab.recommend import first_updates
from stabilitylab.recommend.measurement import everything
from stabilitylab.recommend.planning import bytes_of
from stabilitylab.train.footprint import PROCESS, estimate


@pytest.mark.parametrize(("arch", "sentences"), [("branchnorm", 2), ("rezero", 2), ("resi-dual", 12)])
def test_the_estimate_is_a_close_upper_bound(
    arch: str, sentences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two sentences the weights decide, with twelve the activations. Without the part that is the same for all."""
    monkeypatch.setattr(adam, "AT_ONCE", 1 << 14)
    for name in ("UPDATES", "RATES"):
        monkeypatch.setattr(first_updates, name, 3)
    model = {"arch": arch, "d_model": 128, "d_ffn": 512, "heads": 2}
    data = {"sentences": sentences, "held_out": 2, "vocab_size": 100}
    config = resolve({"model": model, "data": data}, depth=10)
    dataset = load_data(config.data, stack="encoder-decoder")
    gc.collect()  # or what other tests left would be freed while this one is recorded
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        everything(config, dataset, CPU)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in sorted(trace, key=at) if event["name"] == "[memory]"]
    peak = max(accumulate(sizes))
    said = bytes_of(estimate(config, dataset, CPU)) - PROCESS
    assert 0.7 * said < peak < said


def at(event: dict[str, Any]) -> float:
    return event.get("ts", 0.0)
