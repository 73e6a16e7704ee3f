"""CompleteP's rules for width: the forward pass by its formula, the start, the optimizer's groups, the refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_arch_formulas import Written, assert_equals_plain
from test_model_forward import Array

from stabilitylab.config import ModelConfig, TrainConfig
from stabilitylab.designs import DESIGNS
from stabilitylab.errors import UsageError
from stabilitylab.labels import label
from stabilitylab.models import Transformer, build_model
from stabilitylab.models.base import Factors
from stabilitylab.models.groups import groups_of
from stabilitylab.train.recipe import optimizer_of, param_groups

NORMAL: dict[str, Any] = {"embedding_scale": 1, "init": "arch-normal"}
VOCABULARY = {"source_vocab": 37, "target_vocab": 37}


def built(width: int, base: int | None = 8, **settings: Any) -> Transformer:
    options = settings.pop("options", {}) | ({} if base is None else {"base_width": base})
    sizes = {"d_model": width, "d_ffn": 4 * width, "heads": 2, "depth": 4, "stack": "decoder"}
    return build_model(arch="completep", options=options, **{**sizes, **NORMAL, **VOCABULARY, **settings})


class Wide(Written):
    """Attention divided by the size of a head, an embedding without sqrt(d), logits over d / d_base."""

    def scores(self, role: str, q: Array, k: Array) -> Array:
        return q @ k.T / q.shape[-1]

    def embed(self, role: str, tokens: Array) -> Array:
        return super().embed(role, tokens) - (math.sqrt(self.config.d_model) - 1) * self.weights[role][tokens]

    def logits(self, source: Array | None, target: Array, keys: Array) -> Array:
        return super().logits(source, target, keys) / (self.config.d_model / self.config.options["base_width"])


@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder"])
def test_forward_equals_the_formula(stack, randomise, pairs) -> None:
    model = randomise(built(16, stack=stack, depth=8).double())
    assert_equals_plain(model, pairs, Wide(model))
    with pytest.raises(AssertionError):
        assert_equals_plain(model, pairs, Written(model))


@pytest.mark.parametrize("init", ["arch-normal", "arch-gpt2"])
def test_the_start_shrinks_with_the_root_of_the_width_and_not_with_the_depth(init) -> None:
    wide, narrow = built(64, init=init), built(8, init=init)
    for role, (name, rows) in wide.parameter_roles().items():
        weight = wide.get_parameter(name).detach()
        weight = weight if rows is None else weight[rows]
        if role.rpartition(".")[2] in ("q", "k", "v", "out", "fc1", "fc2"):
            assert float(weight.std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05), role
    assert float(wide.decoder.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    (first, *_) = narrow.residuals()
    own = [first.gain(matrix) * math.sqrt(2 / 16) for matrix in ("q", "k", "v", "out")]
    np.testing.assert_allclose(own, 0.02, rtol=1e-12)


@pytest.mark.parametrize("base", [None, 8, 64])
@pytest.mark.parametrize("init", ["arch-normal", "arch-gpt2"])
def test_no_matrix_shrinks_with_the_depth(init, base) -> None:
    """At any base width, and without one: out and fc2 have no 1/sqrt(2 layers)."""
    deep, shallow = (built(64, base, init=init, depth=depth) for depth in (24, 4))
    wide = math.sqrt(64 / base) if base else 1.0
    for residual, own in zip(deep.residuals(), shallow.residuals(), strict=False):
        for matrix, (linear, rows) in residual.f.matrices.items():
            weight, other = (each.f.get_submodule(linear).weight.detach() for each in (residual, own))
            weight, other = (weight, other) if rows is None else (weight[rows], other[rows])
            assert torch.equal(weight, other), matrix
            assert float(weight.std()) == pytest.approx(0.02 / wide, rel=0.05), matrix


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"init": "arch-gpt2"}, "completep normal-init"),
        ({"init": "arch-normal"}, "completep normal-init"),
        ({"init": "base-normal"}, "completep normal-init"),
        ({"init": "base-gpt2"}, "completep xavier gpt2-init"),
        ({"init": "xavier"}, "completep"),
        (DESIGNS["gpt2"], "completep gpt2"),
        ({**DESIGNS["gpt2"], "init": "arch-normal"}, "completep gpt2"),
        ({**DESIGNS["gpt2"], "init": "base-gpt2"}, "completep xavier gpt2"),
    ],
)
def test_its_label_is_that_of_its_initial_weights(settings, expected) -> None:
    sizes = {"stack": "decoder", "encoder_layers": 0, "decoder_layers": 4}
    assert label(ModelConfig.model_validate({"arch": "completep", **sizes, **settings})) == expected


def test_groups_of_twice_the_width_and_twice_the_depth() -> None:
    by_role = {role: group.factors for group in groups_of(built(16, options={"a": 0.5})) for role in group.roles}
    rate = 2**-0.5
    assert by_role["decoder.3.ffn.fc1"] == Factors(rate / 2, rate / 2, 2.0)
    assert by_role["decoder.1.self_attn.q"] == by_role["decoder.1.self_attn.out"] == Factors(rate / 2, rate / 2, 2.0)
    assert by_role["decoder.3.ffn.fc1.bias"] == by_role["decoder.3.ffn.norm.weight"] == Factors(rate, rate / 2, 0.0)
    assert by_role["decoder.embedding"] == Factors(1.0, 0.5, 1.0)
    assert by_role["decoder.norm.weight"] == Factors(1.0, 0.5, 0.0)


def test_at_the_base_width_only_attention_differs(pairs, randomise) -> None:
    wide = randomise(built(16, base=16).double())
    assert wide.output_factor == 1
    plain = built(16, base=None).double()
    plain.load_state_dict(wide.state_dict())
    assert not torch.equal(wide(tokens=pairs["target"]), plain(tokens=pairs["target"]))
    for residual in wide.residuals():
        residual.f.score_scale = None
    assert torch.equal(wide(tokens=pairs["target"]), plain(tokens=pairs["target"]))
    assert {group.factors for group in groups_of(wide)} == {group.factors for group in groups_of(plain)}


def test_the_first_update_moves_the_stream_alike_at_every_width(pairs, loss_of) -> None:
    """The point of the rules: what an update does to the stream does not grow with the width. Without them it does."""

    def moved(width: int, base: int | None) -> float:
        model = built(width, base)
        train = TrainConfig(lr=1e-2, warmup=0, eps=1e-12, weight_decay=0.0)
        optimizer = optimizer_of(train, param_groups(train, groups_of(model)))
        tokens = pairs["target"]
        before = model.hidden(tokens=tokens).detach()
        inputs = {"tokens": tokens, "mask": pairs["target_mask"]}
        loss_of(model, inputs).backward()
        for group in optimizer.param_groups:  # inside the layers alone
            for parameter in group["params"]:
                if parameter is model.decoder.embedding.weight:
                    parameter.grad = None
        optimizer.step()
        return float((model.hidden(tokens=tokens).detach() - before).square().mean().sqrt())

    by_rule = [moved(width, 8) for width in (8, 32, 128)]
    plain = [moved(width, None) for width in (8, 32, 128)]
    assert max(by_rule) / min(by_rule) < 1.6
    assert plain[2] / plain[0] > 2 * by_rule[2] / by_rule[0]


@pytest.mark.parametrize("settings", [{"embedding_scale": "sqrt(d)"}, {"init": "arch"}, {"init": "base-normal"}])
def test_another_start_is_refused(settings) -> None:
    with pytest.raises(UsageError, match=r"arch.base_width needs model.embedding_scale = 1"):
        built(16, **settings)
    built(16, None, **settings)
