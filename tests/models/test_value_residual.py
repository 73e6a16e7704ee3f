"""The value residual of attention: its formula, its start, and what it equals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rest_slow import rest_slow
from test_arch_formulas import NEW, Written, assert_equals_plain
from test_model_invariants import gradients

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.models import Transformer, build_model
from stabilitylab.models.build import parameter_count
from stabilitylab.models.transformer import WithValues

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}
OFF = (0.0, 1.0)


@pytest.mark.parametrize("kind", rest_slow(["fixed", "learned"], ["learned"]))
@pytest.mark.parametrize("arch", sorted({*NEW, "postln", "branchnorm", "admin"}))
def test_forward_equals_the_formula_in_every_architecture(arch, kind, small, randomise, pairs) -> None:
    model = randomise(small(arch, depth=6, value_residual=kind, value_weights=(0.7, 0.4)).double())
    if model.schedule is not None:
        model.schedule.set(0.3)
    plain = Written(model)
    assert_equals_plain(model, pairs, plain)
    plain.weights["decoder.1.self_attn.v"] = 1.1 * plain.weights["decoder.1.self_attn.v"]
    with pytest.raises(AssertionError):
        assert_equals_plain(model, pairs, plain)


def same_weights(plain: Transformer, residual: Transformer) -> Transformer:
    missing, unexpected = residual.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith("value_weights") for name in missing)
    return residual


@pytest.mark.parametrize("kind", ["fixed", "learned"])
@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder"])
def test_weights_0_and_1_are_plain_attention_bit_for_bit(kind, stack, pairs, loss_of) -> None:
    plain = build_model(arch="preln", stack=stack, depth=6, **SIZES)
    mixed = build_model(arch="preln", stack=stack, depth=6, value_residual=kind, value_weights=OFF, **SIZES)
    inputs = pairs if stack == "encoder-decoder" else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    same_weights(plain, mixed)
    expected, found = (gradients(model, loss_of(model, inputs)) for model in (plain, mixed))
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
    assert torch.equal(plain(**inputs), mixed(**inputs))


def test_layer_1_and_a_model_of_one_layer_are_plain_bit_for_bit(randomise, pairs) -> None:
    plain = randomise(build_model(arch="preln", stack="decoder", depth=3, **SIZES))
    mixed = same_weights(plain, build_model(arch="preln", stack="decoder", depth=3, value_residual="fixed", **SIZES))
    first: list[Any] = []
    for model in (plain, mixed):
        model.decoder.layers[0].register_forward_hook(lambda _m, _x, y: first.append(y))
        model(tokens=pairs["target"])
    assert isinstance(first[1], WithValues)
    assert torch.equal(first[0], first[1].stream)
    assert not torch.equal(plain(tokens=pairs["target"]), mixed(tokens=pairs["target"]))
    alone = [build_model(arch="preln", stack="decoder", depth=1, value_residual=k, **SIZES) for k in ("off", "learned")]
    assert torch.equal(alone[0](tokens=pairs["target"]), alone[1](tokens=pairs["target"]))


def test_each_layer_above_the_first_trains_two_numbers() -> None:
    model = build_model(arch="keel", depth=8, value_residual="learned", **SIZES)
    own = {role for role in model.parameter_roles() if role.endswith("value_weights")}
    assert own == {f"{stack}.{n}.self_attn.value_weights" for stack in ("encoder", "decoder") for n in (2, 3, 4)}
    for role in own:
        assert model.get_parameter(model.parameter_roles()[role][0]).tolist() == [0.5, 0.5]
    counted = parameter_count(model.config, source_vocab=37, target_vocab=37)
    assert counted == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["fixed", "learned"])
def test_layers_that_are_computed_again_have_the_same_gradients(kind, pairs, loss_of) -> None:
    model = build_model(arch="preln", depth=8, value_residual=kind, **SIZES)
    expected = gradients(model, loss_of(model, pairs))
    for stack in model.stacks.values():
        stack.checkpointing = True
    again = gradients(model, loss_of(model, pairs))
    assert all(torch.equal(gradient, again[name]) for name, gradient in expected.items())
    assert again["decoder.layers.0.self_attn.f.qkv.weight"].abs().sum() > 0


def test_what_was_not_read_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'sparse', which mixes the values of some top layers only"):
        resolve(parse_set(["model.value_residual=sparse"]), depth=4)


@pytest.mark.parametrize("depth", [6, 12])
def test_it_trains(depth, pairs, loss_of) -> None:
    model = build_model(arch="preln", depth=depth, value_residual="learned", **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, pairs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    assert model.decoder.layers[1].self_attn.f.value_weights.tolist() != [0.5, 0.5]


@pytest.mark.slow
def test_a_pass_is_one_graph(pairs) -> None:
    model = build_model(arch="preln", depth=6, value_residual="learned", **SIZES)
    with torch.no_grad():
        expected = model(**pairs)
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager", fullgraph=True)(**pairs)
    torch._dynamo.reset()
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-6)
