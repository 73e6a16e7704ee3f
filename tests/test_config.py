from __future__ import annotations

from pathlib import Path

import pytest

from stabilitylab.config import Config, parse_set, read_config_file, resolve, validated
from stabilitylab.errors import InputError, UsageError


def test_defaults_are_the_tiny_preset_at_depth_200() -> None:
    config = resolve()
    assert (config.model.encoder_layers, config.model.decoder_layers) == (100, 100)
    assert (config.model.d_model, config.model.d_ffn, config.model.heads) == (64, 128, 2)
    assert (config.train.beta1, config.train.beta2, config.train.eps) == (0.9, 0.98, 1e-8)
    assert config.train.weight_decay == 1e-4
    assert config.train.label_smoothing == 0.1
    assert config.train.clip_norm == 0.0


def test_later_layers_win_and_the_resolved_form_round_trips() -> None:
    config = resolve(
        {"train": {"lr": 1.0, "warmup": 7}}, {"train": {"lr": 2.0}}, parse_set(["train.lr=3e-4"]), depth=12
    )
    assert (config.train.lr, config.train.warmup, config.model.depth) == (3e-4, 7, 12)
    assert validated(config.model_dump(mode="json")) == config


def test_tfixup_trains_without_warm_up_unless_told_otherwise() -> None:
    assert resolve({"model": {"arch": "T-Fixup"}}).train.warmup == 0
    assert resolve({"preset": "base", "model": {"arch": "tfixup"}}).train.warmup == 0
    assert resolve({"model": {"arch": "tfixup"}}, {"train": {"warmup": 7}}).train.warmup == 7
    assert resolve({"model": {"arch": "postln", "decoder_arch": "tfixup"}}).train.warmup == 120


def test_base_preset_is_the_papers() -> None:
    config = resolve({"preset": "base"}, depth=36)
    assert (config.model.d_model, config.model.d_ffn, config.model.heads) == (512, 2048, 8)
    assert (config.train.lr, config.train.warmup, config.model.T) == (5e-4, 4000, 4000)


def test_a_single_stack_takes_the_whole_depth() -> None:
    config = resolve({"model": {"stack": "decoder"}}, depth=7)
    assert (config.model.encoder_layers, config.model.decoder_layers) == (0, 7)


def test_layers_by_name_leave_the_depth_alone() -> None:
    config = resolve({"model": {"encoder_layers": 60, "decoder_layers": 12}})
    assert config.model.depth == 72


@pytest.mark.parametrize(
    ("settings", "depth", "sentence"),
    [
        ({}, 0, "--depth 0 is out of range"),
        ({}, 10**9, "--depth 1000000000 is out of range"),
        ({}, 13, "--depth 13 is odd"),
        ({"preset": "huge"}, 2, "unknown preset 'huge'; choose one of tiny, small, base"),
        ({"train": {"learning_rate": 1}}, 2, "unknown setting 'train.learning_rate'; known are steps, lr"),
        ({"training": {"lr": 1}}, 2, "unknown setting 'training'; known are preset, model"),
        ({"train": {"lr": -1}}, 2, "setting train.lr = -1"),
        ({"train": {"lr": float("nan")}}, 2, "setting train.lr"),
        ({"model": {"heads": 3}}, 2, "model.d_model = 64 must be a multiple of model.heads = 3"),
        ({"model": {"d_model": 63, "heads": 1}}, 2, "must be even"),
        ({"model": {"stack": "decoder", "decoder_arch": "preln"}}, 2, "needs an encoder and a decoder"),
        ({"model": {"encoder_layers": 0, "decoder_layers": 2}}, None, "model.encoder_layers must be at least 1"),
        ({"probes": {"every": 0}}, 2, "probes.every must be at least 1, or 'log'"),
        ({"model": {"stack": "sideways"}}, 2, "setting model.stack = 'sideways'"),
    ],
)
def test_bad_settings_get_one_sentence(settings: dict, depth: int | None, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(settings, depth=depth)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("assignment", ["train.lr", "lr=3", "=3", "train.=3", ".lr=3"])
def test_set_wants_section_key_value(assignment: str) -> None:
    with pytest.raises(UsageError, match="not of the form"):
        parse_set([assignment])


def test_set_values_are_toml_or_text() -> None:
    settings = parse_set(["model.init=xavier", "model.T=100", "train.lr=1e-3", "probes.names=['ln_input']"])
    assert settings == {"model": {"init": "xavier", "T": 100}, "train": {"lr": 1e-3}, "probes": {"names": ["ln_input"]}}


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "small"\n[train]\nlr = 1e-3\n')
    config = resolve(read_config_file(path), depth=2)
    assert (config.preset, config.train.lr, config.model.d_model) == ("small", 1e-3, 256)
    path.write_text("[train\n")
    with pytest.raises(InputError, match="cannot read the configuration"):
        read_config_file(path)
    with pytest.raises(InputError, match=r"cannot read .*absent\.toml"):
        read_config_file(tmp_path / "absent.toml")


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("train", "warmup"),
    [
        ({}, 120),
        ({"steps": 160}, 80),
        ({"steps": 9}, 4),
        ({"steps": 6000}, 120),
        ({"steps": 9, "horizon": 100}, 50),
        ({"steps": 9, "warmup": 7}, 7),
    ],
)
def test_a_short_run_warms_up_in_half_of_its_updates(train: dict[str, int], warmup: int) -> None:
    assert resolve({"train": train}).train.warmup == warmup
    assert resolve({"preset": "small", "train": train}).train.warmup == train.get("warmup", 4000)


@pytest.mark.parametrize(("steps", "T"), [(160, 6), (6000, 240), (8, 2)])
def test_an_architecture_that_ramps_does_so_for_four_percent_of_the_run(steps: int, T: int) -> None:
    shared = {"train": {"steps": steps}}
    assert resolve(shared, {"model": {"arch": "branchnorm"}}).model.T == T
    assert resolve(shared, {"model": {"arch": "postln", "decoder_arch": "branchnorm"}}).model.T == T
    assert resolve(shared, {"model": {"arch": "branchnorm", "T": 50}}).model.T == 50
    assert resolve(shared, {"model": {"arch": "postln"}}).model.T == 100  # it means nothing there
    assert resolve(shared, {"preset": "small", "model": {"arch": "branchnorm"}}).model.T == 4000
