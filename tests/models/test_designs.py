"""The designs gpt2 and llama: each switch, and every architecture in them, against formulas in float64 numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_arch_formulas import NEW, OLD, Written, assert_equals_plain
from test_model_forward import Array

from stabilitylab.config import ModelConfig, resolve
from stabilitylab.designs import DESIGNS, block_width
from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, Place, Transformer, build_model, deepnorm_constants
from stabilitylab.models.base import xavier_gain
from stabilitylab.models.sublayers import rotated, rotation

erf = np.vectorize(math.erf)


class Designed(Written):
    """The formulas with positions, activation and embedding scale written out again."""

    def linear(self, role: str, x: Array) -> Array:
        bias = self.weights.get(f"{role}.bias")
        assert (bias is None) == (self.arch(role) == "rfixup" or not self.config.bias)
        return x @ self.weights[role].T + (0 if bias is None else bias)

    def embed(self, role: str, tokens: Array) -> Array:
        if self.config.positions == "sinusoidal":
            return super().embed(role, tokens)
        x = self.weights[role][tokens]
        x = x if self.config.embedding_scale == 1 else x * math.sqrt(self.config.d_model)
        learned = self.config.positions == "learned"
        return x + self.weights[role.replace("embedding", "positions")][: len(tokens)] if learned else x

    def turned(self, x: Array) -> Array:
        """RoPE of one head: pair (2i, 2i + 1) of position t as a complex number times exp(i t 10000^(-2i/size))."""
        if self.config.positions != "rope":
            return x
        size = x.shape[-1]
        pairs = x[:, 0::2] + 1j * x[:, 1::2]
        angles = np.array([[t * 10_000 ** (-2 * i / size) for i in range(size // 2)] for t in range(len(x))])
        pairs = pairs * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    def scores(self, role: str, q: Array, k: Array) -> Array:
        if self.config.qk_norm or self.arch(role).startswith("hybridnorm"):
            q, k = self.unit(role, "q", q), self.unit(role, "k", k)
        if role.endswith("self_attn"):
            q, k = self.turned(q), self.turned(k)
        return q @ k.T / math.sqrt(q.shape[-1])

    def act(self, role: str, x: Array) -> Array:
        if self.config.activation == "swiglu":
            gate = self.linear(f"{role}.gate", x)
            return gate / (1 + np.exp(-gate)) * self.linear(f"{role}.fc1", x)
        hidden = self.linear(f"{role}.fc1", x)
        shift = lambda place: self.weights[f"{role}.activation.{place}.b"] if self.arch(role) == "rfixup" else 0.0  # noqa: E731
        hidden = hidden - shift("before")
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2 if self.config.activation == "gelu" else hidden.clip(0)
        return hidden - shift("after")


def built(arch: str, **settings: Any) -> Transformer:
    sizes: dict[str, Any] = {"d_model": 16, "heads": 2, "source_vocab": 37, "target_vocab": 37}
    model = build_model(arch=arch, **(sizes | {"depth": 3} | settings))
    if model.calibrated is not None:
        model.calibrated.set(True)
    return model.double()


@pytest.mark.parametrize("design", ["gpt2", "llama"])
@pytest.mark.parametrize("arch", sorted(NEW | OLD))
def test_every_architecture_runs_in_each_design_or_refuses_with_its_reason(arch, design, randomise, pairs) -> None:
    if "decoder" not in ARCHS[arch].defined_for or (arch == "rfixup" and design == "llama"):
        why = "its paper gives constants" if arch == "tfixup" else "SwiGLU has three"
        with pytest.raises(UsageError, match=why):
            built(arch, design=design)
        return
    model = randomise(built(arch, design=design))
    if model.schedule is not None:
        model.schedule.set(0.3)
    assert_equals_plain(model, pairs, Designed(model))


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
@pytest.mark.parametrize(
    "settings",
    [
        {"positions": "learned", "bias": False},
        {"positions": "rope", "qk_norm": True, "activation": "gelu"},
        {"activation": "swiglu", "qk_norm": True, "bias": False},
        {"positions": "rope", "embedding_scale": 1, "norm": "rmsnorm"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_each_switch_works_in_every_kind_of_model(settings, stack, randomise, pairs) -> None:
    depth = 4 if stack == "encoder-decoder" else 2
    model = randomise(built("preln", stack=stack, depth=depth, d_ffn=32, **settings))
    assert_equals_plain(model, pairs, Designed(model))


def test_the_comparison_can_fail(randomise, pairs) -> None:
    model = randomise(built("preln", design="llama"))
    for role in ("decoder.1.ffn.gate", "decoder.2.ffn.fc1"):
        plain = Designed(model)
        plain.weights[role] = plain.weights[role] * 1.1
        with pytest.raises(AssertionError):
            assert_equals_plain(model, pairs, plain)
    plain = Designed(model)
    plain.turned = lambda x: x
    with pytest.raises(AssertionError):
        assert_equals_plain(model, pairs, plain)


def test_a_rotation_keeps_lengths_and_makes_scores_depend_on_the_distance_alone() -> None:
    x, y = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    turn = rotation(40, 8, x)
    q, k = (rotated(z.expand(1, 40, 1, 8), turn)[0, :, 0] for z in (x, y))
    torch.testing.assert_close(q.norm(dim=-1), x.norm().expand(40), rtol=0, atol=1e-12)
    scores = q @ k.T
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5], rtol=0, atol=1e-12)
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 1e-6


def test_gelu_is_the_exact_one() -> None:
    model = built("preln", design="gpt2")
    activation = model.decoder.layers[0].ffn.f.activation
    assert float(activation(torch.tensor(1.0, dtype=torch.float64))) == pytest.approx(0.8413447460685429, abs=1e-12)


@pytest.mark.parametrize(("width", "qkv", "out"), [(512, 0.4525, 0), (768, 0.5543, 0), (1024, 0.6400, 0)])
def test_the_base_of_gpt2_in_units_of_xavier(width, qkv, out) -> None:
    """Reference: .02 sqrt(d) for q, k, v, .02 sqrt(2.5 d) for fc1, 1/sqrt(2M) of it for out and fc2."""
    fc1 = {512: 0.7155, 768: 0.8764, 1024: 1.0119}[width]
    for layers, smaller in ((6, 0.288675), (12, 0.204124), (24, 0.144338), (48, 0.102062)):
        place = Place("decoder", 1, "ffn", width, 0, layers, base="gpt2", inner_width=4 * width)
        found = {matrix: xavier_gain(place, matrix) for matrix in ("q", "k", "v", "out", "fc1", "fc2")}
        assert [found[m] for m in "qkv"] == pytest.approx([qkv] * 3, abs=6e-5)
        assert (found["fc1"], found["out"]) == pytest.approx((fc1, found["q"] * smaller), abs=6e-5)
        assert found["fc2"] == pytest.approx(found["fc1"] * smaller, rel=1e-5)


@pytest.mark.parametrize("design", ["gpt2", "llama"])
def test_initial_weights_of_a_design_have_the_standard_deviation_it_states(design) -> None:
    model = built("preln", design=design, d_model=512, heads=8, source_vocab=2000, target_vocab=2000, depth=2)
    named = dict(model.named_parameters())
    for role, (name, rows) in model.parameter_roles().items():
        weight = named[name].detach() if rows is None else named[name].detach()[rows]
        if weight.dim() == 1:
            assert bool((weight == float(".norm" in role and not role.endswith("bias"))).all()), role
            continue
        smaller = 2.0 if design == "gpt2" and role.endswith((".out", ".fc2")) else 1.0  # sqrt(2 * 2 layers)
        assert float(weight.std()) == pytest.approx(0.02 / smaller, rel=0.02), role
    tied = model.output.weight is model.decoder.embedding.weight
    assert tied == (design == "gpt2")
    assert ("decoder.positions" in model.parameter_roles()) == (design == "gpt2")
    assert not [name for name in named if name.endswith("bias")] or design == "gpt2"


@pytest.mark.parametrize(
    ("settings", "expected"),  # of a feed-forward block whose input has the variance 1
    [
        ({"activation": "gelu"}, 0.2329),
        ({"activation": "gelu", "init": "arch-gpt2", "depth": 12}, 0.005452),
        ({"activation": "swiglu", "d_ffn": 2048}, 0.13912),
        ({"activation": "swiglu", "d_ffn": 2048, "arch": "deepnorm", "depth": 12}, 1.449e-3),
    ],
    ids=["gelu", "gpt2", "swiglu", "swiglu with beta"],
)
def test_the_variance_of_a_feed_forward_block_at_initialisation(settings, expected) -> None:
    sizes = {"stack": "decoder", "d_model": 768, "d_ffn": 3072, "heads": 8, "source_vocab": 9, "target_vocab": 9}
    model = build_model(**{"arch": "preln", "depth": 1, **sizes, **settings})
    x = torch.randn(400, 1, 768, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = [float(layer.ffn.f(x).square().mean()) for layer in model.decoder.layers[:2]]
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.02)


def test_deepnorm_keeps_its_own_gains_in_a_design() -> None:
    """beta on v, out, fc1 (W_3) and fc2 (W_2); 1 on q, k and the gate (W_1)."""
    model = built("deepnorm", design="llama", depth=12, d_model=256, heads=4)
    beta = deepnorm_constants("decoder", 0, 12)[1]
    named = dict(model.named_parameters())
    for role, (name, rows) in model.parameter_roles().items():
        matrix = role.rpartition(".")[2]
        if matrix in ("q", "k", "v", "out", "fc1", "fc2", "gate"):
            weight = named[name].detach() if rows is None else named[name].detach()[rows]
            gain = float(weight.std()) / math.sqrt(2 / sum(weight.shape))
            assert gain == pytest.approx(1.0 if matrix in ("q", "k", "gate") else beta, rel=0.03), role


def test_swiglu_is_linear_in_both_matrices_that_have_beta() -> None:
    """Then F with them scaled is beta^2 F exactly, as with ReLU (finding 9 of the reference), which GELU breaks."""
    x = torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ratios = {}
    for activation in ("swiglu", "relu", "gelu"):
        f = built("preln", stack="decoder", activation=activation, d_ffn=32).decoder.layers[0].ffn.f
        before = f(x).detach()
        for name in ("fc1", "fc2"):
            f.get_parameter(f"{name}.weight").data.mul_(0.3)
        ratios[activation] = float((f(x).detach() - 0.09 * before).abs().max() / before.abs().max())
    assert max(ratios["swiglu"], ratios["relu"]) < 1e-15
    assert ratios["gelu"] > 1e-3


# M, alpha, beta, FFN's LN-input variance, the constant of admin-torch, Sub-LN's gamma: table 3.3 of the reference
TABLE = """
6   1.861210 .379918 3.470768  2.017009  1.576359
12  2.213364 .319472 4.902313  2.601286  1.782710
24  2.632148 .268642 6.929870  3.404484  1.967537
32  2.828427 .250000 8.001250  3.817217  2.039334
48  3.130169 .225901 9.798792  4.494833  2.136434
64  3.363586 .210224 11.314333 5.054130  2.202732
100 3.760603 .188030 14.142536 6.074611  2.301807
200 4.472136 .158114 20.000200 8.117922  2.447747
500 5.623413 .125743 31.622857 11.995359 2.628261
"""


@pytest.mark.parametrize("row", [line.split() for line in TABLE.strip().splitlines()], ids=lambda row: row[0])
def test_constants_of_decoders_alone(row) -> None:
    place = Place("decoder", 0, "", 64, 0, int(row[0]))
    alpha, beta, variance, admin, gamma = map(float, row[1:])
    said = {name: ARCHS[name].constants(place) for name in ("deepnorm", "branchnorm", "admin", "subln")}
    assert said["deepnorm"] == pytest.approx({"alpha": alpha, "beta": beta}, abs=6e-7)
    assert said["branchnorm"] == pytest.approx({"beta": beta}, abs=6e-7)
    assert said["subln"] == pytest.approx({"gamma": gamma}, abs=6e-7)
    assert said["admin"] == pytest.approx({"omega of admin-torch, not used here": admin}, abs=6e-7)
    assert said["deepnorm"]["alpha"] ** 2 + 0.32 * said["deepnorm"]["beta"] ** 4 == pytest.approx(variance, abs=2e-6)


@pytest.mark.parametrize(
    ("design", "width", "inner"),
    [("gpt2", 64, 256), ("llama", 64, 176), ("llama", 512, 1368), ("llama", 96, 256), ("transformer", 64, None)],
)
def test_width_of_the_feed_forward_blocks(design, width, inner) -> None:
    assert block_width(design, width) == inner
    if inner is not None:
        assert inner % 8 == 0
        assert resolve({"model": {"design": design, "d_model": width}}, depth=2).model.d_ffn == inner
        assert resolve({"model": {"design": design, "d_model": width, "d_ffn": 99}}, depth=2).model.d_ffn == 99


def test_a_design_is_a_name_for_settings() -> None:
    for name, own in DESIGNS.items():
        resolved = resolve({"model": {"design": name}}, depth=4).model
        assert {key: getattr(resolved, key) for key in own} == own
    asked = resolve({"model": {"design": "llama", "norm": "layernorm", "kind": "encoder-decoder"}}, depth=4).model
    assert (asked.norm, asked.stack, asked.positions) == ("layernorm", "encoder-decoder", "rope")


def test_kind_is_another_name_of_stack() -> None:
    assert resolve({"model": {"kind": "decoder"}}, depth=5).model.decoder_layers == 5
    assert ModelConfig.model_validate({"kind": "decoder", "encoder_layers": 0}).stack == "decoder"
    assert "kind" not in ModelConfig.model_validate({"kind": "encoder-decoder"}).model_dump()
    with pytest.raises(UsageError, match="are one setting"):
        resolve({"model": {"kind": "decoder", "stack": "encoder"}}, depth=5)


def test_learned_positions_end_and_the_error_says_so(pairs) -> None:
    model = built("preln", design="gpt2", context=6)
    with pytest.raises(UsageError, match="has 6 learned positions and was given 7 tokens"):
        model(tokens=pairs["target"])
    assert model(tokens=pairs["target"][:, :6]).shape == (5, 6, 37)
    assert build_model(design="gpt2", depth=1, source_vocab=5, target_vocab=5).decoder.positions.num_embeddings == 1024
    assert resolve({"model": {"design": "gpt2"}, "data": {"max_length": 50}}, depth=2).model.context == 56


def test_learned_positions_are_a_module_that_is_called(pairs) -> None:
    """Hooks see it, as they see nn.Embedding in anybody's GPT."""
    model, seen = built("preln", design="gpt2", depth=1), []
    model.decoder.positions.register_forward_hook(lambda module, args, output: seen.append(output))
    model(tokens=pairs["target"][:, :6])
    assert [torch.equal(each, model.decoder.positions.weight[:6]) for each in seen] == [True]


def test_heads_of_an_odd_size_have_no_rotation() -> None:
    with pytest.raises(UsageError, match="must be even"):
        resolve({"model": {"design": "llama", "d_model": 6, "heads": 2}}, depth=2)


def test_folded_admin_with_a_gate_is_admin(randomise, pairs) -> None:
    model = randomise(built("admin", design="llama"))
    before = model(tokens=pairs["target"])
    model.finalize()
    torch.testing.assert_close(model(tokens=pairs["target"]), before, rtol=0, atol=1e-5)


def test_beta_of_deepnorm_may_be_replaced_and_q_k_and_the_gate_stay() -> None:
    """As for a comparison with the gain (8M)^(+1/4), 9.8 times too large at 12 layers."""
    inverted = (8 * 12) ** 0.25
    plain, changed = (
        built("deepnorm", design="llama", depth=12, options=options) for options in ({}, {"beta": inverted})
    )
    assert inverted / deepnorm_constants("decoder", 0, 12)[1] == pytest.approx(9.797959, abs=1e-6)
    for role, (name, rows) in plain.parameter_roles().items():
        matrix = role.rpartition(".")[2]
        part = slice(None) if rows is None else rows
        one, other = (model.get_parameter(name).detach()[part] for model in (plain, changed))
        factor = 9.79795897113271 if matrix in ("v", "out", "fc1", "fc2") else 1.0
        torch.testing.assert_close(other, one * factor, rtol=3e-6, atol=0)
