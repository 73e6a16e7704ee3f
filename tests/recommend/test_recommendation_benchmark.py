"""The benchmark asks for what the trained runs have, and its table says what was measured."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from made_verdict import made_verdict
from recommend_cases import SMALL

from stabilitylab.config import merge, resolve
from stabilitylab.recommend import Ask, wanted
from stabilitylab.recommend.measurement import file_name, measure
from stabilitylab.reports.collection import Runs
from stabilitylab.store import RunWriter

ARCHS = ("postln", "preln", "deepnorm", "rezero", "tfixup")
ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path, arch: str, gap: float) -> None:
    shallow = {"model": {"arch": arch, "encoder_layers": 1, "decoder_layers": 1}, "train": {"final_checkpoint": False}}
    settings = merge(SMALL, shallow)
    settings["train"].pop("warmup")  # its own recipe
    facts = {"label": arch, "config": resolve(settings).model_dump(mode="json"), "kind": "train"}
    with RunWriter.create(folder / arch, facts) as run:
        run.open([])
        run.append(0, {"loss": 1.0}, {})
        run.set_status("finished", 1, "made up", verdict=made_verdict("trained", gap))


def test_it_ranks_with_the_settings_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark: Any = importlib.import_module("recommendation")
    for place, arch in enumerate(ARCHS):
        trained(tmp_path / "runs", arch, float(place - 9))
    given = benchmark.settings_of(Runs.load(tmp_path / "runs"))
    assert given["train"] == {"lr": 1e-3, "final_checkpoint": False}
    assert given["data"] == {key: value for key, value in SMALL["data"].items() if key != "seed"}
    assert "warmup" not in given["train"]  # which would take T-Fixup's own from it

    configs, _ = wanted(Ask(2, None, ARCHS, (0,), given))
    assert {config.model.arch: config.train.warmup for config in configs}["tfixup"] == 0
    for config in configs:
        measure(config, tmp_path / "measured", file_name(config))
    arguments = [tmp_path / "runs", "--depths", "2", "--seeds", "0", "--measured", tmp_path / "measured"]
    out = tmp_path / "out.md"
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--archs", ",".join(ARCHS), "--out", str(out)])
    benchmark.main()
    text = out.read_text()
    assert text.rstrip().endswith(capsys.readouterr().out.rstrip())
    assert "## 2 layers: 5 architectures, one seed of trained runs (5 trained)" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines][:3] == [
        "against how runs ended",
        "the ranking",
        "gradient decades",
    ]
    assert {line.split("|")[2].strip(): line.split("|")[5].strip() for line in lines[-5:]} == {
        arch: str(place) for place, arch in enumerate(ARCHS, start=1)
    }
