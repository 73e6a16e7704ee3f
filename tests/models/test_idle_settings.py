"""Settings that change nothing in a model: refused in new runs, each with its reason, and still read from old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stabilitylab.config import ModelConfig, resolve, validated
from stabilitylab.errors import UsageError
from stabilitylab.models import Transformer, build_model
from stabilitylab.models.idle import refuse_idle, say_equal
from stabilitylab.train import plan

SIZES: dict[str, Any] = {"d_model": 16, "heads": 2, "source_vocab": 11, "target_vocab": 11}
LLAMA: dict[str, Any] = {"design": "llama"}
GENERAL = {
    "prores_T": 7,
    "prores_t0": 3,
    "prores_order": "through",
    "value_weights": (0.0, 1.0),
    "norm_alpha": (0.8, 0.2, 0.2),
    "context": 99,
}
IDLE: list[tuple[dict[str, Any], str]] = [
    ({"arch": "deepnorm", "init": "deepnorm", "options": {"beta": 3.0}}, r"arch\.beta = 3\.0 .* 'deepnorm' leaves out"),
    ({"arch": "deepnorm", "init": "xavier", "options": {"beta": 3.0}}, r"arch\.beta"),
    ({"arch": "deepnorm", "init": "base-normal", **LLAMA, "options": {"beta": 3.0}}, r"arch\.beta"),
    ({"arch": "hyper-connections", "init": "base-gpt2", "options": {"root_n": True}}, r"arch\.root_n"),
    ({"arch": "hyper-connections-static", "init": "xavier-1", "options": {"root_n": True}}, r"arch\.root_n"),
    ({"arch": "hyper-connections", "options": {"root_n": True, "n": 1}}, r"arch\.root_n = true .* whose root is 1"),
    ({"arch": "hybridnorm", "qk_norm": True}, r"model\.qk_norm = true .* a norm of queries"),
    ({"arch": "hybridnorm-star", "qk_norm": True, **LLAMA}, r"model\.qk_norm"),
    *(({"arch": arch, "norm": norm}, r"model\.norm") for arch in ("rezero", "tfixup") for norm in ("dyt", "derf")),
    ({"arch": "rfixup", "norm": "rmsnorm"}, r"model\.norm = 'rmsnorm' .* has no norms"),
    ({"arch": "rezero", "norm": "layernorm", **LLAMA}, r"model\.norm"),
    ({"arch": "rfixup", "bias": False}, r"model\.bias = false .* no biases"),
    ({"arch": "postln", "stack": "decoder", "prores": "linear", "prores_order": "through"}, r"a single stack"),
    ({"arch": "postln", "prores": "equal", "prores_order": "through"}, r"at the same time"),
    *(({"arch": "preln", key: value}, rf"model\.{key} = .* changes nothing here") for key, value in GENERAL.items()),
]
USED: list[dict[str, Any]] = [
    {"arch": "deepnorm", "init": "arch-normal", "options": {"beta": 3.0}},
    {"arch": "deepnorm", "decoder_arch": "preln", "options": {"beta": 3.0}},
    {"arch": "hyper-connections", "init": "arch-1", "options": {"root_n": True}},
    {"arch": "hyper-connections", "init": "xavier", "options": {"root_n": False}},
    {"arch": "postln", "decoder_arch": "hybridnorm", "qk_norm": True},
    {"arch": "rezero", "decoder_arch": "preln", "norm": "rmsnorm"},
    {"arch": "rezero", **LLAMA},
    {"arch": "rezero", "norm": "rmsnorm", "qk_norm": True},
    {"arch": "rfixup", "design": "gpt2"},
    {"arch": "rfixup", **LLAMA, "activation": "relu"},
    {"arch": "rfixup", "bias": False, "qk_norm": True},
    {"arch": "postln", "prores": "linear", "prores_order": "through", "prores_T": 7, "prores_t0": 2},
    {"arch": "preln", "value_residual": "fixed", "value_weights": (0.0, 1.0)},
    {"arch": "preln", "norm": "derf", "norm_alpha": (0.8, 0.2, 0.2)},
    {"arch": "preln", "positions": "learned", "context": 99},
]


def settings_of(given: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in given.items())


def outputs(model: Transformer) -> torch.Tensor:
    model.set_row(5)
    tokens = torch.arange(8).reshape(2, 4)
    inputs = {"source": tokens, "target": tokens} if len(model.stacks) == 2 else {"tokens": tokens}
    return model(**inputs)


@pytest.mark.parametrize(("given", "message"), IDLE, ids=[settings_of(given) for given, _ in IDLE])
def test_a_setting_that_changes_nothing_is_refused(given, message) -> None:
    config = resolve({"model": given}, depth=4)
    for build in (
        lambda: build_model(depth=4, **SIZES, **given),
        lambda: plan(config),
        lambda: refuse_idle(config.model),
    ):
        with pytest.raises(UsageError, match=f"{message}.*leave it out"):
            build()


@pytest.mark.parametrize("given", USED, ids=settings_of)
def test_one_that_changes_something_is_not(given) -> None:
    refuse_idle(resolve({"model": given}, depth=4).model)


@pytest.mark.parametrize("given", [given for given, _ in IDLE], ids=settings_of)
def test_an_old_run_with_one_is_read_and_built_as_without_it(given) -> None:
    """The refusal is right: the model has the same weights and outputs without the setting."""
    recorded = resolve({"model": {"d_model": 16, **given}}, depth=4).model_dump(mode="json")
    config = validated(recorded)
    model = build_model(config.model, source_vocab=11, target_vocab=11)
    kept = {key: value for key, value in given.items() if key in ("arch", "init", "stack", "design", "prores")}
    without = build_model(depth=4, **SIZES, **kept, options={"n": 1} if "n" in given.get("options", {}) else {})
    assert model.state_dict().keys() == without.state_dict().keys()
    torch.testing.assert_close(outputs(model), outputs(without), rtol=0, atol=0)


def test_the_defaults_of_all_designs_are_accepted() -> None:
    for arch in ("preln", "rezero", "hybridnorm", "rfixup"):
        for design in ("transformer", "gpt2", "llama"):
            own = {"activation": "relu"} if arch == "rfixup" else {}
            config = resolve({"model": {"arch": arch, "design": design, **own}}, depth=4).model
            refuse_idle(config)
            refuse_idle(ModelConfig.model_validate(config.model_dump()))  # as a job of a sweep is given it


EQUAL: list[tuple[dict[str, Any], str, int]] = [
    ({"arch": "mix-ln"}, "preln", 3),
    ({"arch": "mix-ln", "options": {"post_share": 0.1}}, "preln", 9),
    ({"arch": "attnres-block"}, "attnres", 4),
    ({"arch": "attnres-block", "options": {"blocks": 3}}, "attnres", 1),
]


@pytest.mark.parametrize(("given", "other", "most"), EQUAL, ids=[settings_of(given) for given, _, _ in EQUAL])
def test_a_stack_that_equals_another_architecture_is_said(given, other, most, caplog) -> None:
    built = [build_model(depth=most, stack="decoder", **SIZES, **kept).eval() for kept in (given, {"arch": other})]
    assert built[0].state_dict().keys() == built[1].state_dict().keys()
    torch.testing.assert_close(outputs(built[0]), outputs(built[1]), rtol=0, atol=0)
    plan(resolve({"model": {"stack": "decoder", **given}}, depth=most))
    (said,) = caplog.messages
    assert said.startswith(f"{given['arch']} with {most} layer")
    assert f"in the decoder equals {other}:" in said
    caplog.clear()
    say_equal(resolve({"model": {"stack": "decoder", **given}}, depth=most + 1).model)
    say_equal(resolve({"model": {"stack": "decoder", "arch": other}}, depth=most).model)
    assert caplog.messages == []
