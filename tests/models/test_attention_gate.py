"""Gated attention: its formula, its start, and what it equals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rest_slow import rest_slow
from test_arch_formulas import NEW, Written, assert_equals_plain

from stabilitylab.models import Transformer, build_model

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}


@pytest.mark.parametrize("kind", rest_slow(["head", "element"], ["element"]))
@pytest.mark.parametrize("arch", sorted(NEW))
def test_forward_equals_the_formula_in_every_architecture(arch, kind, small, randomise, pairs) -> None:
    model = randomise(small(arch, attention_gate=kind).double())
    plain = Written(model)
    assert_equals_plain(model, pairs, plain)
    plain.weights["decoder.1.cross_attn.gate"] = plain.weights["decoder.1.cross_attn.gate"] + 1.0
    with pytest.raises(AssertionError):
        assert_equals_plain(model, pairs, plain)


def opened(model: Transformer, gated: Transformer) -> Transformer:
    """The weights of ``model`` in ``gated``, whose gates are at 0 and whose outputs of attention are doubled."""
    gated.load_state_dict(model.state_dict(), strict=False)
    for name, parameter in gated.named_parameters():
        if ".gate." in name:
            parameter.data.zero_()
        elif "attn.f.out.weight" in name:
            parameter.data.mul_(2)
    return gated


@pytest.mark.parametrize("kind", ["head", "element"])
def test_gates_at_0_over_a_doubled_output_are_plain_attention_bit_for_bit(kind, small, pairs) -> None:
    plain = small("preln", depth=6, bias=False)
    gated = opened(plain, small("preln", depth=6, bias=False, attention_gate=kind))
    assert torch.equal(gated(**pairs), plain(**pairs))


@pytest.mark.parametrize(("kind", "rows"), [("head", 8), ("element", 512)])
def test_the_gate_is_drawn_as_queries_are_and_the_branch_starts_at_half(kind, rows) -> None:
    sizes = {"d_model": 512, "d_ffn": 64, "heads": 8, "source_vocab": 9, "target_vocab": 9}
    for settings, std in (
        ({}, math.sqrt(0.5 / 512)),
        ({"init": "arch-gpt2"}, 0.02),
        ({"qk_gain": 3.0}, 3 / math.sqrt(512)),
    ):
        model = build_model(arch="postln", stack="decoder", depth=1, attention_gate=kind, **sizes, **settings)
        gate = model.decoder.layers[0].self_attn.f.gate
        assert gate.weight.shape == (rows, 512)
        assert float(gate.weight.detach().std()) == pytest.approx(std, rel=0.05)
        assert not gate.bias.detach().any()
        mean = float(gate(torch.randn(400, 512, generator=torch.Generator().manual_seed(0))).detach().sigmoid().mean())
        assert mean == pytest.approx(0.5, abs=0.02)


def test_without_gates_nothing_is_there() -> None:
    names = [name for name, _ in build_model(arch="preln", depth=2, **SIZES).named_parameters()]
    assert not any("gate" in name for name in names)


def test_a_folded_admin_divides_the_gates_too(small, randomise, pairs) -> None:
    model = randomise(small("admin", attention_gate="head").double())
    before = model(**pairs).detach()
    model.finalize()
    torch.testing.assert_close(model(**pairs), before, rtol=0, atol=1e-4)
