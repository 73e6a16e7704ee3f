"""GPAS, Mix-LN and HybridNorm: what each equals, and what holds exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_arch_formulas import Written, assert_equals_plain
from test_model_forward import Array
from test_model_invariants import copy_weights, gradients
from torch import Tensor, nn

from stabilitylab.config import parse_set, resolve
from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, Place, Transformer, build_model
from stabilitylab.models.archs.mix_ln import last_post_layer
from stabilitylab.models.norms import QueryKeyScale
from stabilitylab.train.hessian import without_hessian

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}
GATES = ["preln", "sandwich", "layernorm-scaling", "postln"]


def gated(arch: str = "gpas", **settings: Any) -> Transformer:
    return build_model(arch=arch, **{"depth": 6, **SIZES, **settings})


class Host(Written):
    """GPAS on each of its hosts."""

    def join(self, arch: str, role: str, x: Array, f) -> Array:
        stack, layer, _ = role.split(".")
        gate = self.weights[f"{stack}.{layer}.self_attn.depth_gate"].item()
        kept = 1 - gate / (1 + math.exp(-gate))
        host = self.config.options.get("host", "preln")
        if host == "postln":
            return self.norm(f"{role}.norm", kept * x + f(x))
        entering = self.norm(f"{role}.norm", x)
        if host == "layernorm-scaling":
            entering = entering / math.sqrt(int(layer))
        branch = f(entering)
        return kept * (x + (self.norm(f"{role}.outer_norm", branch) if host == "sandwich" else branch))


@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("host", GATES)
def test_gpas_on_each_host_equals_the_formula(host, stack, randomise, pairs) -> None:
    model = randomise(gated(stack=stack, options={"host": host}).double())
    assert_equals_plain(model, pairs, Host(model))


def test_gpas_with_closed_gates_on_post_ln_is_post_ln_and_one_more_norm(randomise, pairs) -> None:
    plain = randomise(gated("postln", stack="decoder"))
    gpas = gated(stack="decoder", options={"host": "postln"})
    gpas.load_state_dict(plain.state_dict(), strict=False)
    tokens = pairs["target"]
    assert torch.equal(gpas.hidden(tokens=tokens), gpas.decoder.norm(plain.hidden(tokens=tokens)))


@pytest.mark.parametrize("host", [host for host in GATES if host != "postln"])
def test_gpas_with_closed_gates_is_its_host_bit_for_bit(host, randomise, pairs, loss_of) -> None:
    plain = randomise(gated(host))
    gpas = gated(options={"host": host})
    missing, unexpected = gpas.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith("depth_gate") for name in missing)
    assert torch.equal(gpas(**pairs), plain(**pairs))
    expected, found = (gradients(model, loss_of(model, pairs)) for model in (plain, gpas))
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())


def test_gpas_shrinks_forward_and_not_backward() -> None:
    """g = 1: forward factor 1 - SiLU(1) = .268941421, backward the identity; at g = 0 the gate has -<., y> / 2."""
    residual = next(iter(gated(stack="decoder", depth=2).double().residuals()))
    y = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    toward = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own, gate = torch.autograd.grad((residual.shrunk(y) * toward).sum(), (y, residual.depth_gate))
    assert torch.equal(own, toward)
    assert float(gate) == pytest.approx(float(-0.5 * (toward * y).sum().detach()), rel=1e-12)
    residual.depth_gate.data.fill_(1.0)
    torch.testing.assert_close(residual.shrunk(y), 0.268941421369995 * y, rtol=0, atol=1e-12)
    assert torch.equal(torch.autograd.grad((residual.shrunk(y) * toward).sum(), y)[0], toward)


def test_one_gate_a_layer() -> None:
    model = gated()
    assert len([name for name, _ in model.named_parameters() if name.endswith("depth_gate")]) == 6
    for layer in model.decoder.layers:
        assert layer.self_attn.depth_gate is layer.cross_attn.depth_gate is layer.ffn.depth_gate


def test_probes_of_the_hessian_are_refused_where_backward_is_not_the_gradient() -> None:
    def config(arch: str, names: str):
        return resolve(parse_set([f"model.arch={arch}", f"probes.names={names}"]), depth=2)

    with pytest.raises(UsageError, match="gpas detaches a part of its forward pass"):
        without_hessian(config("gpas", "['default', 'sharpness']"))
    left = without_hessian(config("gpas", "['all']")).probes.names
    assert {"-sharpness", "-preconditioned_sharpness"} <= set(left)
    for arch, names in (("gpas", "['default', 'critical_sharpness']"), ("preln", "['sharpness']")):
        assert without_hessian(config(arch, names)) == config(arch, names)


@pytest.mark.parametrize(
    ("layers", "share", "last"), [(12, 0.25, 3), (6, 0.25, 1), (100, 0.29, 29), (7, 1.0, 7), (7, 0.0, 0), (3, 0.25, 0)]
)
def test_the_boundary_of_mix_ln(layers, share, last) -> None:
    assert last_post_layer(layers, share) == last
    if share == 0.25:
        assert ARCHS["mix-ln"].constants(Place("decoder", 0, "", 64, 0, layers)) == {"Post-LN layers": last}


def test_mix_ln_between_its_two_ends(pairs, randomise, loss_of) -> None:
    mixed = randomise(gated("mix-ln", stack="decoder", options={"post_share": 0.0}))
    inputs = {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    preln = copy_weights(mixed, gated("preln", stack="decoder"))
    assert torch.equal(mixed(**inputs), preln(**inputs))
    whole = copy_weights(mixed, gated("mix-ln", stack="decoder", options={"post_share": 1.0}))
    postln = gated("postln", stack="decoder")
    postln.load_state_dict({k: v for k, v in mixed.state_dict().items() if not k.startswith("decoder.norm")})
    assert torch.equal(whole.hidden(**inputs), whole.decoder.norm(postln.hidden(**inputs)))
    assert not torch.equal(whole(**inputs), preln(**inputs))


def test_the_stream_of_mix_ln_has_rms_1_at_the_boundary(pairs) -> None:
    model = gated("mix-ln", stack="decoder", depth=8, norm="rmsnorm").double()
    seen: list[Tensor] = []
    for number in (1, 2):
        model.decoder.layers[number].register_forward_hook(lambda _m, _i, y: seen.append(y))
    model(tokens=pairs["target"])
    rms = [float(y.detach().square().mean(-1).sqrt().sub(1).abs().max()) for y in seen]
    assert rms[0] < 1e-4 < 1e-2 < rms[1]


def settled(model: Transformer) -> Transformer:
    """The model in float64, its norms without epsilon."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm, QueryKeyScale)):
            module.eps = 0.0
    return model.double()


@pytest.mark.parametrize("arch", ["hybridnorm", "hybridnorm-star"])
def test_hybridnorm_as_the_paper_writes_it_bit_for_bit(arch, randomise, pairs) -> None:
    model = randomise(gated(arch, stack="decoder"))
    x = model.decoder.embed(pairs["target"])
    for number, layer in enumerate(model.decoder.layers):
        own, ffn = layer.self_attn, layer.ffn
        if arch.endswith("star") and number == 0:
            y = x + own.f(own.norm(x))
            x = y + ffn.f(ffn.norm(y))
        else:
            y = x + own.f(x)
            x = own.norm(y) + ffn.f(own.norm(y))
    assert torch.equal(model.decoder.norm(x), model.hidden(tokens=pairs["target"]))


def test_hybridnorm_does_not_see_the_size_of_queries_keys_and_values(randomise, pairs) -> None:
    model = settled(randomise(gated("hybridnorm", bias=False)))
    before = model(**pairs).detach()
    for residual in model.residuals():
        for name, factor in (("q", 3.0), ("k", 0.2), ("v", 7.0)):
            if name in residual.f.matrices:
                linear, rows = residual.f.matrices[name]
                weight = residual.f.get_parameter(f"{linear}.weight")
                weight.data[slice(None) if rows is None else rows] *= factor
    torch.testing.assert_close(model(**pairs), before, rtol=0, atol=1e-11)
    residual.f.fc2.weight.data.mul_(1.01)
    assert (model(**pairs) - before).abs().max() > 1e-6


def test_values_are_normalised_in_each_head(pairs) -> None:
    scale = QueryKeyScale("rmsnorm", 8, values=True)
    v = torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    own = scale(v, v, v)[2].detach().numpy()
    np.testing.assert_allclose((own**2).mean(-1), 1, atol=1e-4)
    assert torch.equal(QueryKeyScale("rmsnorm", 8)(v, v, v)[2], v)
