"""Keys of runs: the same on every machine for the same run, another one for another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import pytest
from sweep_cases import config, on

from stabilitylab.config import Config, Later, TrainConfig, complete, later_settings, neutral_settings, resolve
from stabilitylab.errors import InputError
from stabilitylab.sweep.identity import data_of, key_of


def test_the_key_of_the_defaults_stays_what_it_was() -> None:
    """Whoever sees this fail has changed what a committed ledger's keys mean. A new setting: annotate it with
    ``Later(before)``, the value that does what was done without it. A default that changed: write the new key here."""
    assert key_of(Config()) == "efd0d6565a4446f0"


def test_every_setting_that_decides_something_is_in_the_key() -> None:
    other: dict[str, Any] = {
        "model.decoder_arch": "postln", "model.stack": "decoder", "model.tie": "none", "model.init": "xavier",
        "model.norm": "rmsnorm", "model.growth": "exp", "model.alpha": 0.5, "model.qk_gain": 0.5, "model.v_gain": 0.5,
        "data.source": "hf:x,de,en", "data.valid": "test", "train.schedule": "constant", "train.optimizer": "radam",
        "train.precision": "bf16", "train.cuda_graphs": "on", "train.parallel": "ddp", "train.on_divergence": "stop",
        "train.attention": "math", "train.compile": "on", "train.horizon": 1000,
        "probes.names": ("none",), "probes.every": 3, "probes.update_every": 3,
        "probes.curvature_every": 3, "probes.curvature_batch": "training", "preset": "small",
        "model.design": "gpt2", "model.norm_alpha": (0.5, 0.5, 0.25), "model.attention_gate": "head",
        "model.value_residual": "fixed", "model.value_weights": (0.5, 0.25),
        "model.positions": "rope", "model.context": 64, "model.activation": "gelu", "model.embedding_scale": 1,
        "model.prores": "linear", "model.prores_order": "through",
        "train.device": "cuda", "model.arch": "preln", "model.options": {"kappa": 2.0},
    }  # fmt: skip
    base, seen = Config(), {}
    for name, field in Config.model_fields.items():
        inner = getattr(base, name)
        for key in type(inner).model_fields if name != "preset" else ("",):
            setting = f"{name}.{key}".rstrip(".")
            value = getattr(inner, key) if key else inner
            new = other[setting] if setting in other else (not value if isinstance(value, bool) else value + 1)
            if isinstance(value, float) and setting not in other:
                new = value / 2 + 0.25
            section = inner.model_copy(update={key: new}) if key else new
            assert field is not None
            changed = key_of(base.model_copy(update={name: section})) != key_of(base)
            assert changed is (setting not in neutral_settings()), setting
            seen[setting] = changed
    assert sum(seen.values()) > 40
    assert {"preset", "train.device", "train.threads", "train.checkpoint_every"} <= neutral_settings()


def test_one_spelling_and_one_way_to_say_the_same() -> None:
    keys = {key_of(config(arch)) for arch in ("deepnorm", "Deep-Norm", "deep_norm")}
    model = config().model.model_copy(update={"decoder_arch": "DeepNorm"})
    assert {*keys, key_of(config().model_copy(update={"model": model}))} == keys
    assert len(keys) == 1


def test_files_stand_for_their_content_wherever_they_lie(texts: Path, tmp_path: Path) -> None:
    there = shutil.copytree(texts, tmp_path / "there")
    (there / "a.de").rename(there / "b.de")
    moved = on(there).model_dump()
    moved["data"]["source"] = f"text: {there}/b.de , {there}/a.en"
    assert key_of(Config.model_validate(moved)) == key_of(on(texts))
    assert key_of(on(texts)) != key_of(Config())
    before = key_of(on(texts))
    for name in ("a.en", "v.de"):
        (texts / name).write_text("another text\n")
        assert key_of(on(texts)) != before
        before = key_of(on(texts))
    assert str(tmp_path) not in data_of(on(texts))
    assert data_of(on(texts)).startswith("text:a.de@")
    assert " valid v.de@" in data_of(on(texts))
    (texts / "a.de").unlink()
    with pytest.raises(InputError, match=r"cannot read .*a.de \(No such file"):
        key_of(on(texts))


def test_a_folder_of_data_counts_by_what_it_holds(texts: Path, tmp_path: Path) -> None:
    there = shutil.copytree(texts, tmp_path / "there")
    sources = [resolve({"data": {"source": f"hf:{folder},de,en"}}) for folder in (texts, there)]
    assert key_of(sources[0]) == key_of(sources[1])
    assert data_of(sources[0]).startswith("hf:here@")
    assert data_of(sources[0]).endswith(",de,en")
    assert key_of(resolve({"data": {"source": f"hf:{texts},en,de"}})) != key_of(sources[0])
    (there / "a.de").rename(there / "c.de")
    assert key_of(sources[0]) != key_of(sources[1])
    assert data_of(resolve({"data": {"source": "hf:x/y,de,en", "valid": "test"}})) == "hf:x/y,de,en valid test"


def test_a_setting_that_comes_later_leaves_older_keys_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grown(TrainConfig):
        novelty: Annotated[int, Later(0)] = 3

    class Newer(Config):
        train: Grown = Grown()

    old = key_of(Config())
    monkeypatch.setattr("stabilitylab.config.Config", Newer)
    before = {"horizon": None, "evaluations": 0, "compile": "auto", "one_pass": False, "novelty": 0}
    assert later_settings()["train"] == before
    assert complete({"train": {"lr": 1.0}})["train"]["novelty"] == 0  # a run from before did what 0 does
    assert key_of(Newer(train=Grown(novelty=0))) == old
    assert key_of(Newer()) != old
