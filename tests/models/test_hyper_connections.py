"""Hyper-Connections and mHC: what each equals at the start, its groups, and Sinkhorn's vector."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from rest_slow import rest_slow
from test_arch_formulas import Written, assert_equals_plain
from test_model_forward import Array
from test_model_invariants import gradients
from torch import Tensor, nn

from stabilitylab.errors import UsageError
from stabilitylab.models import Transformer, build_model
from stabilitylab.models.archs.mhc import doubly_stochastic
from stabilitylab.models.groups import groups_of

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}
NAMES = ["hyper-connections-static", "hyper-connections"]


def built(arch: str, depth: int = 6, stack: str = "decoder", **options: Any) -> Transformer:
    return build_model(arch=arch, stack=stack, depth=depth, options=options, **SIZES)


def same_weights(plain: Transformer, model: Transformer) -> Transformer:
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    own = ("gather", "carry", "spread", "mixture_scale", "spread_scale", "stream_norm", "phi", "scales")
    assert all(any(part in name for part in own) for name in missing)
    return model


@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("n", rest_slow([1, 2, 4], [2]))
@pytest.mark.parametrize("arch", NAMES)
def test_hyper_connections_start_as_preln_bit_for_bit(arch, n, stack, randomise, pairs) -> None:
    plain = randomise(built("preln", 8, stack))
    inputs = pairs if stack == "encoder-decoder" else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    model = same_weights(plain, built(arch, 8, stack, n=n))
    assert torch.equal(model.hidden(**inputs), plain.hidden(**inputs))
    assert torch.equal(model(**inputs), plain(**inputs))


def test_dynamic_ones_start_as_static_ones_bit_for_bit(pairs, loss_of) -> None:
    inputs = {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    static = built(NAMES[0]).double()
    dynamic = same_weights(static, built(NAMES[1]).double())
    assert torch.equal(static(**inputs), dynamic(**inputs))
    expected, found = (gradients(model, loss_of(model, inputs)) for model in (static, dynamic))
    for name, gradient in expected.items():  # of a matrix of one for all tokens or of one each: other sums
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14)
    assert all(found[name].any() for name in found if "_from" in name)
    assert not any(found[name].any() for name in found if "_scale" in name), "W = 0 hides its scale"


def test_each_connection_starts_at_its_own_stream() -> None:
    for stack, number in (("decoder", 2), ("encoder-decoder", 3)):
        model = built(NAMES[0], 8, stack)
        layers = model.decoder.layers
        starts = [int(each.gather.argmax()) for layer in layers for each in layer.children()]
        assert starts == [s % 4 for s in range(number * len(layers))]
        assert all(torch.equal(each.carry, torch.eye(4)) for each in model.residuals())
        assert all(torch.equal(each.spread, torch.ones(4)) for each in model.residuals())


@pytest.mark.parametrize(("options", "factor"), [({}, 1.0), ({"root_n": True}, 2.0)])
def test_the_larger_start_of_out_and_fc2_is_an_option(options, factor) -> None:
    plain, model = built("preln"), built(NAMES[1], **options)
    for own, other in zip(plain.residuals(), model.residuals(), strict=True):
        for matrix in own.f.matrices:
            assert other.gain(matrix) == own.gain(matrix) * (factor if matrix in ("out", "fc2") else 1)


def test_static_parts_do_not_decay() -> None:
    by_role = {role: group.factors for group in groups_of(built(NAMES[1])) for role in group.roles}
    still = {role for role, factors in by_role.items() if factors.decay == 0}
    assert {role.rpartition(".")[2] for role in still} == {"gather", "carry", "spread"}
    assert by_role["decoder.2.ffn.carry_from"].decay == 1
    assert {(factors.lr, factors.eps) for factors in by_role.values()} == {(1.0, 1.0)}


def test_streams_part_in_training(pairs, loss_of) -> None:
    """The start of each connection at its own stream breaks the symmetry; mHC's start as Pre-LN never does."""

    def apart(model: Transformer) -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        inputs = {"tokens": pairs["target"], "mask": pairs["target_mask"]}
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, inputs).backward()
            optimizer.step()
        streams: list[tuple[Tensor, ...]] = []
        model.decoder.layers[-1].register_forward_hook(lambda _m, _x, y: streams.append(y))
        model(**inputs)
        return float(torch.stack(streams[0]).detach().std(0).max())

    assert apart(built(NAMES[0]).double()) > 1e-3
    assert apart(built("mhc").double()) > 1e-3
    assert apart(built("mhc", start="preln").double()) < 1e-12


def without_eps(model: Transformer) -> Transformer:
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.eps = 0.0
    return model.double()


@pytest.mark.parametrize("stack", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_stream_of_mhc_may_start_as_preln(n, stack, pairs) -> None:
    plain = without_eps(built("preln", 6, stack))
    model = same_weights(plain, without_eps(built("mhc", 6, stack, n=n, start="preln")))
    inputs = pairs if stack == "encoder-decoder" else {"tokens": pairs["target"]}
    streams: list[Any] = []
    plain_stream: list[Tensor] = []
    model.decoder.layers[-1].register_forward_hook(lambda _m, _x, y: streams.append(y))
    plain.decoder.layers[-1].register_forward_hook(lambda _m, _x, y: plain_stream.append(y))
    for each in (model, plain):
        each(**inputs)
    for stream in streams[0]:
        torch.testing.assert_close(stream, plain_stream[0], rtol=0, atol=1e-12)


Z = [[0, 1, -1, 0.5], [0.3, -0.2, 0.8, 0], [-0.5, 0.4, 0.1, 1.2], [0.7, 0, -0.3, -1]]
ROUNDS_20 = [
    [0.185589827, 0.449503213, 0.084555543, 0.280351417],
    [0.234683439, 0.126829230, 0.479194787, 0.159292544],
    [0.095570127, 0.209445652, 0.215665786, 0.479318434],
    [0.484156607, 0.214221905, 0.220583884, 0.081037604],
]


def test_sinkhorns_vector() -> None:
    mixture = doubly_stochastic(torch.tensor(Z, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(mixture, ROUNDS_20, rtol=0, atol=5e-10)
    np.testing.assert_allclose(mixture.sum(0), 1, rtol=0, atol=1e-15)
    np.testing.assert_allclose(mixture.sum(1), 1, rtol=0, atol=1e-15)
    once = doubly_stochastic(torch.tensor(Z, dtype=torch.float64), 1).numpy()
    np.testing.assert_allclose(once[0], [0.202185410, 0.453084855, 0.083271989, 0.261457745], rtol=0, atol=5e-10)
    assert abs(once.sum(0) - 1).max() == pytest.approx(0.0727, abs=5e-5)
    large = doubly_stochastic(torch.tensor(Z, dtype=torch.float64) + 800)  # exp(800) is infinite
    np.testing.assert_allclose(large.numpy(), mixture, rtol=0, atol=1e-12)


def test_one_stream_that_starts_as_preln_is_nearly_preln(pairs) -> None:
    """H_pre is sigmoid(8)."""
    one = next(iter(built("mhc", n=1, start="preln").double().residuals()))
    states = torch.randn(2, 5, 1, 16, dtype=torch.float64)
    gather, _, spread = one.connections(states.unbind(2), states)
    assert float(1 - gather.detach().max()) == pytest.approx(3.35e-4, rel=1e-2)
    assert torch.equal(spread, torch.ones_like(spread))


def in_logarithms(logits: Array) -> Array:
    """Every round in the logarithms of float64."""
    for _ in range(20):
        logits = logits - np.logaddexp.reduce(logits, -2, keepdims=True)
        logits = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    return np.exp(logits)


@pytest.mark.parametrize("lower", [20.0, 95.0, 120.0, 300.0])
def test_rows_and_columns_far_below_the_largest_logit_are_mixed(lower: float) -> None:
    """exp(-104) is 0 in float32, and 0 / 0 was NaN."""
    rows = torch.tensor(Z)
    rows[1] -= lower
    columns = torch.tensor(Z)
    columns[:, 2] -= lower
    falling = torch.tensor([[0.0, -8.0], [-lower - 8, -lower]])
    odd = torch.tensor([[0.0, -8, -8], [-8, -lower, -8], [-8 - lower / 2, -lower, 3 - lower]])
    for given in (rows, columns, falling, odd):
        logits = given.clone().requires_grad_()
        mixture = doubly_stochastic(logits)
        np.testing.assert_allclose(
            mixture.detach().numpy(), in_logarithms(given.double().numpy()), rtol=2e-4, atol=1e-30
        )
        (mixture * torch.arange(float(mixture.numel())).reshape(mixture.shape)).sum().backward()
        assert logits.grad is not None
        assert bool(logits.grad.isfinite().all())
    np.testing.assert_allclose(doubly_stochastic(columns).numpy(), ROUNDS_20, rtol=2e-4)  # columns come first


def test_mhc_of_one_stream_mixes_nothing_and_starts_at_the_published_mixture(pairs) -> None:
    one = next(iter(built("mhc", n=1).residuals()))
    states = torch.randn(2, 5, 1, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one.connections(states.unbind(2), states)[1], torch.ones(2, 5, 1, 1))
    four = next(iter(built("mhc", start="preln").double().residuals()))
    states = torch.randn(2, 5, 4, 16, dtype=torch.float64)
    gather, carry, spread = four.connections(states.unbind(2), states)
    torch.testing.assert_close(gather, torch.full_like(gather, 0.25), rtol=0, atol=1e-8)
    torch.testing.assert_close(spread, torch.ones_like(spread), rtol=0, atol=0)
    np.testing.assert_allclose(carry[0, 0].diagonal().detach(), 0.998994624, rtol=0, atol=5e-10)
    assert float(carry[0, 0, 0, 1].detach()) == pytest.approx(0.000335125, abs=5e-10)


@pytest.mark.parametrize("options", [{"n": 2}, {"n": 3, "start": "preln"}])
def test_mhc_equals_its_formula_for_other_streams(options, randomise, pairs) -> None:
    model = randomise(built("mhc", 3, **options).double())
    assert_equals_plain(model, pairs, Written(model))


@pytest.mark.parametrize("arch", [*NAMES, "mhc"])
def test_layers_that_are_computed_again_have_the_same_gradients(arch, pairs, loss_of) -> None:
    model = built(arch, 8, "encoder-decoder")
    expected = gradients(model, loss_of(model, pairs))
    for stack in model.stacks.values():
        stack.checkpointing = True
    again = gradients(model, loss_of(model, pairs))
    assert all(torch.equal(gradient, again[name]) for name, gradient in expected.items())


def test_a_copy_shows_its_own_streams() -> None:
    model = built(NAMES[0], 2)
    twin = copy.deepcopy(model)
    assert twin.decoder.layers[0].shown_stream.args[0] is twin.decoder.trunk
    assert model.decoder.layers[0].shown_stream.args[0] is model.decoder.trunk


def test_norms_without_statistics_are_refused() -> None:
    with pytest.raises(UsageError, match=r"not defined with model\.norm = 'dyt'"):
        build_model(arch="mhc", stack="decoder", depth=2, norm="dyt", **SIZES)
