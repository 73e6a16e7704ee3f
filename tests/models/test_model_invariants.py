"""What must hold exactly between the architectures, and at alpha = 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rest_slow import rest_slow, slow
from torch import Tensor

from stabilitylab.models import Residual, Transformer, build_model, deepnorm_constants


def gradients(model: Transformer, loss: Tensor) -> dict[str, Tensor]:
    return dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True),
            strict=True,
        )
    )


def copy_weights(source: Transformer, target: Transformer) -> Transformer:
    missing, unexpected = target.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert all(key.startswith(("schedule.", "calibrated.")) or key.endswith(".omega") for key in missing)
    return target


def stream_gradients(model: Transformer, inputs: dict[str, Tensor], loss_of) -> dict[str, list[Tensor]]:
    """dL/dx for the input x of each sub-layer, from the bottom of each stack up."""
    streams: dict[str, list[Tensor]] = {name: [] for name in model.stacks}
    handles = [
        residual.register_forward_pre_hook(lambda module, args: streams[module.place.stack].append(args[0]))
        for residual in model.residuals()
    ]
    loss = loss_of(model, inputs)
    for handle in handles:
        handle.remove()
    return {name: list(torch.autograd.grad(loss, xs, retain_graph=True)) for name, xs in streams.items()}


@pytest.mark.parametrize("stack", ["encoder-decoder", "encoder", "decoder"])
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("branchnorm", {"alpha": 1.0}),
        ("branchnorm", {"T": 1}),
        ("deepnorm", {"alpha": 1.0}),
        ("admin", {}),
    ],
)
def test_unit_constants_give_postln_bit_for_bit(arch, settings, stack, small, randomise, pairs, loss_of) -> None:
    inputs = pairs if stack == "encoder-decoder" else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    postln = randomise(small("postln", stack=stack, depth=6))
    other = copy_weights(postln, small(arch, stack=stack, depth=6, **settings))
    assert torch.equal(postln(**inputs), other(**inputs))
    expected, found = (gradients(model, loss_of(model, inputs)) for model in (postln, other))
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_deepnorm_without_alpha_is_branchnorm_without_ramp_bit_for_bit(pairs, loss_of) -> None:
    """Beta alone under its two names, from its own initial weights and over an update."""
    sizes: dict[str, Any] = {"depth": 6, "d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}
    deepnorm, branchnorm = (
        build_model(arch="deepnorm", alpha=1.0, **sizes),
        build_model(arch="branchnorm", T=1, **sizes),
    )
    for step in range(3):
        branchnorm.set_row(step)
        expected, found = (gradients(model, loss_of(model, pairs)) for model in (deepnorm, branchnorm))
        assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
        with torch.no_grad():
            for model, by_name in ((deepnorm, expected), (branchnorm, found)):
                for name, parameter in model.named_parameters():
                    parameter.sub_(by_name[name], alpha=0.1)
        assert torch.equal(deepnorm(**pairs), branchnorm(**pairs))


def test_another_constant_is_not_postln(small, pairs) -> None:
    postln = small("postln")
    assert not torch.equal(postln(**pairs), copy_weights(postln, small("deepnorm", alpha=1.001))(**pairs))


def test_constant_omega_is_deepnorm_bit_for_bit(small, randomise, pairs) -> None:
    deepnorm = randomise(small("deepnorm", alpha=2.2))
    admin = copy_weights(deepnorm, small("admin"))
    for residual in admin.residuals():
        residual.get_parameter("omega").data.fill_(2.2)
    assert torch.equal(deepnorm(**pairs), admin(**pairs))


@pytest.mark.slow
def test_branch_over_alpha_is_deepnorm_up_to_the_norms_epsilon(small, pairs) -> None:
    for a in (0.81, 2.0, 4.0):
        deepnorm = small("deepnorm", alpha=a, d_model=64, depth=12)
        branchnorm = copy_weights(deepnorm, small("branchnorm", alpha=1 / a, d_model=64, depth=12))
        deviation = (deepnorm.hidden(**pairs) - branchnorm.hidden(**pairs)).abs().max()
        assert 0 < deviation < 3e-5


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_beta_in_the_weights_is_beta_squared_on_the_branch(bias, small, pairs) -> None:
    """Positive homogeneity: true without biases (what architectures start with), false with them."""
    alpha, beta = deepnorm_constants("decoder", 0, 8)
    deepnorm = small("deepnorm", stack="decoder", depth=8, d_model=64)
    unscaled = copy_weights(deepnorm, small("branchnorm", stack="decoder", depth=8, d_model=64, alpha=beta**2 / alpha))
    named = dict(unscaled.named_parameters())
    for role, (name, rows) in unscaled.parameter_roles().items():
        part = named[name] if rows is None else named[name][rows]
        if role.endswith((".v", ".out", ".fc1", ".fc2")):
            part.data.div_(beta)
        if role.endswith(".fc1.bias"):
            part.data.fill_(bias)
            deepnorm.get_parameter(name).data.fill_(bias)
    inputs = {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    deviation = (deepnorm.hidden(**inputs) - unscaled.hidden(**inputs)).abs().max()
    assert deviation < 3e-5 if bias == 0 else deviation > 1e-3


@pytest.fixture
def at_alpha(pairs) -> Callable[[float, torch.dtype], Transformer]:
    def make(alpha: float, dtype: torch.dtype = torch.float64) -> Transformer:
        model = build_model(arch="branchnorm", depth=24, alpha=alpha, source_vocab=37, target_vocab=37, tie="none")
        model = model.to(dtype)
        model.set_row(0)
        return model

    return make


def test_alpha_zero_leaves_the_encoder_at_the_norm_of_its_input(at_alpha, pairs) -> None:
    model = at_alpha(0.0, torch.float32)
    inputs: list[Tensor] = []
    model.encoder.layers[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    memory = model.encoder(pairs["source"])
    expected = torch.nn.functional.layer_norm(inputs[0], (64,))
    assert (memory - expected).abs().max() < 2e-5


def test_alpha_zero_gives_every_decoder_sublayer_the_same_gradient(at_alpha, pairs, loss_of) -> None:
    streams = stream_gradients(at_alpha(0.0), pairs, loss_of)
    norms = torch.stack([gradient.norm() for gradient in streams["decoder"]])
    below_top = norms[1:]  # the first one is taken before the first norm, at a stream of another scale
    assert len(below_top) == 35
    assert below_top.max() / below_top.min() - 1 < 2e-6  # the epsilon of the norms
    assert all(gradient.count_nonzero() == 0 for gradient in streams["encoder"])
    full = stream_gradients(at_alpha(1.0), pairs, loss_of)
    norms = torch.stack([gradient.norm() for gradient in full["decoder"]][1:])
    assert norms.max() / norms.min() - 1 > 1e-2


def test_alpha_zero_leaves_gradients_only_to_norms_embedding_and_output(at_alpha, pairs, loss_of) -> None:
    model = at_alpha(0.0)
    found = gradients(model, loss_of(model, pairs))
    assert all(gradient is not None for gradient in found.values())  # multiplied, not skipped
    alive = {name for name, gradient in found.items() if gradient.count_nonzero()}
    norms = {
        f"decoder.layers.{layer}.{sublayer}.norm.{kind}"
        for layer in range(12)
        for sublayer in ("self_attn", "cross_attn", "ffn")
        for kind in ("weight", "bias")
    }
    assert alive == norms | {"decoder.embedding.weight", "output.weight"}


def test_small_alpha_moves_decoder_branches_as_alpha_and_encoder_branches_as_its_square(
    at_alpha, pairs, loss_of
) -> None:
    def branch_norms(alpha: float) -> dict[str, float]:
        model = at_alpha(alpha)
        found = gradients(model, loss_of(model, pairs))
        return {
            stack: math.sqrt(sum(float(g.norm() ** 2) for n, g in found.items() if n.startswith(stack) and ".f." in n))
            for stack in ("encoder", "decoder")
        }

    small, twice = branch_norms(1e-3), branch_norms(2e-3)
    assert twice["decoder"] / small["decoder"] == pytest.approx(2, rel=0.005)
    assert twice["encoder"] / small["encoder"] == pytest.approx(4, rel=0.005)


def test_alpha_zero_does_not_hide_a_broken_branch(at_alpha, pairs) -> None:
    model = at_alpha(0.0)
    model.decoder.layers[3].ffn.f.fc2.weight.data[0, 0] = math.inf
    assert not model(**pairs).isfinite().all()


def taps(model: Transformer, inputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    seen: dict[str, dict[str, Tensor]] = {}

    def keep(residual: Residual, tap: str):
        return lambda _module, _inputs, output: seen.setdefault(str(residual.place), {}).__setitem__(tap, output)

    for residual in model.residuals():
        for name, child in residual.named_children():
            if name != "f":
                child.register_forward_hook(keep(residual, name))
    with torch.no_grad():
        model(**inputs)
    return seen


def test_preln_variance_is_the_sum_of_the_branches(small) -> None:
    model = small("preln", stack="encoder", depth=12, d_model=512, d_ffn=2048, heads=8)
    seen = taps(model, {"tokens": torch.arange(320).view(10, 32) % 37})
    variances = [taps_of["branch"].var(correction=0) for taps_of in seen.values()]
    start = seen["encoder.1.self_attn"]["shortcut"].var(correction=0)
    last = seen["encoder.12.ffn"]
    end = (last["shortcut"] + last["branch"]).var(correction=0)
    assert float(end - start) == pytest.approx(float(sum(variances)), rel=0.1)


@pytest.mark.parametrize(
    ("arch", "squared"),
    [
        slow("postln", 1.0),
        slow("deepnorm", math.sqrt(2 * 12)),
        ("branchnorm", 1.0),
    ],
)
def test_postln_family_norm_input_has_variance_shortcut_plus_branch(arch, squared, small) -> None:
    model = small(arch, stack="encoder", depth=12, d_model=512, d_ffn=2048, heads=8)
    seen = taps(model, {"tokens": torch.arange(320).view(10, 32) % 37})
    for place, taps_of in list(seen.items())[1:]:
        shortcut, branch = taps_of["shortcut"], taps_of.get("scaled_branch", taps_of["branch"])
        assert float(shortcut.var(correction=0)) == pytest.approx(squared, rel=1e-4), place
        entered = float((shortcut + branch).var(correction=0))  # branch and stream are nearly uncorrelated
        assert entered == pytest.approx(squared + float(branch.var(correction=0)), rel=0.15), place


@pytest.mark.parametrize("dropout", rest_slow([0.0, 0.1], [0.1]))
def test_feed_forward_branch_has_its_expected_variance(dropout, small) -> None:
    """.32 gain^4 for f = 4d and ReLU, over (1 - p)^2 with dropout p at both places."""
    model = small("deepnorm", encoder_layers=18, decoder_layers=18, d_model=512, d_ffn=2048, heads=8,
                  dropout=dropout, activation_dropout=dropout).train()  # fmt: skip
    x = torch.randn(400, 1, 512, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    for residual, beta in ((model.encoder.layers[4].ffn, 0.352571), (model.decoder.layers[4].ffn, 0.260847)):
        with torch.no_grad():
            variance = float(residual.f(x).var(correction=0))
        assert variance == pytest.approx(0.32 * beta**4 / (1 - dropout) ** 2, rel=0.05)
