"""KEEL: its constants, its exceptions, and what it equals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from stabilitylab.models import ARCHS, Place, Transformer, build_model

SIZES = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}


def exact(model: Transformer) -> Transformer:
    """The model in float64 with norms without epsilon."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.eps = 0.0
    return model.double()


def decoder(arch: str, depth: int = 6, **settings) -> Transformer:
    return exact(build_model(arch=arch, stack="decoder", depth=depth, **SIZES, **settings))


@pytest.mark.parametrize(
    ("layers", "alpha"),
    [(6, 12), (12, 24), (24, 48), (32, 64), (48, 96), (64, 128), (100, 200), (200, 400), (512, 1024)],
)
def test_alpha_is_the_number_of_sublayers(layers, alpha) -> None:
    keel = ARCHS["keel"]
    assert keel.constants(Place("decoder", 0, "", 64, 0, layers)) == {"alpha": alpha}
    assert keel.constants(Place("encoder", 0, "", 64, layers, layers)) == {"alpha": 2 * layers}
    assert keel.constants(Place("decoder", 0, "", 64, layers, layers)) == {"alpha": 3 * layers}


def test_the_first_layer_is_an_exception() -> None:
    for sizes, own in (((0, 3), {"decoder": 6.0}), ((2, 3), {"encoder": 4.0, "decoder": 9.0})):
        stack = "encoder-decoder" if sizes[0] else "decoder"
        layers = {"encoder_layers": sizes[0], "decoder_layers": sizes[1]}
        for residual in build_model(arch="keel", stack=stack, **layers, **SIZES).residuals():
            place = residual.place
            first = place.layer == 1 and place.sublayer == "self_attn"
            assert residual.alpha == (1.0 if place.layer == 1 else own[place.stack])
            assert hasattr(residual, "norm") == (not first)
            assert residual.inner_norm is not None


def test_no_norm_has_a_bias() -> None:
    for norm in ("layernorm", "rmsnorm"):
        names = [name for name, _ in build_model(arch="keel", depth=4, norm=norm, **SIZES).named_parameters()]
        assert not [name for name in names if "norm" in name and name.endswith("bias")]
        assert any("norm" in name for name in names)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_it_is_deepnorm_of_the_same_alpha_behind_its_first_layer_as_long_as_gains_are_1(norm, pairs) -> None:
    """Finding 3 of the reference: the inner norm sees a stream that is normalised already."""
    keel, deepnorm = decoder("keel", norm=norm), decoder("deepnorm", norm=norm, alpha=12.0, init="xavier")
    x = keel.decoder.layers[0](keel.decoder.embed(pairs["target"]), None, None, None)
    ours = theirs = x
    for one, other in zip(keel.decoder.layers[1:], deepnorm.decoder.layers[1:], strict=True):
        ours, theirs = one(ours, None, None, None), other(theirs, None, None, None)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert not torch.equal(keel(tokens=pairs["target"]), deepnorm(tokens=pairs["target"]))
    keel.decoder.layers[2].ffn.inner_norm.weight.data.mul_(2)
    again = x
    for one in keel.decoder.layers[1:]:
        again = one(again, None, None, None)
    assert (again - theirs).abs().max() > 1e-6


def test_without_inner_norm_and_alpha_it_is_postln_bit_for_bit_but_for_the_first_sublayer(pairs) -> None:
    settings = {"stack": "decoder", "depth": 4, "norm": "rmsnorm", **SIZES}
    keel = build_model(arch="keel", alpha=1.0, options={"inner": False}, **settings)
    postln = build_model(arch="postln", **settings)
    x = keel.decoder.embed(pairs["target"])
    ours = theirs = keel.decoder.layers[0].self_attn(x)
    for number, (one, other) in enumerate(zip(keel.decoder.layers, postln.decoder.layers, strict=True)):
        ours = one.ffn(ours if number == 0 else one.self_attn(ours))
        theirs = other.ffn(theirs if number == 0 else other.self_attn(theirs))
    assert torch.equal(ours, theirs)
    assert not torch.equal(keel.decoder.layers[0].self_attn(x), postln.decoder.layers[0].self_attn(x))


@pytest.mark.parametrize(
    ("sublayers", "gain"), [(12, 0.959328), (24, 0.979400), (200, 0.997503), (512, 0.999024), (1000, 0.999500)]
)
def test_the_shortcuts_jacobian_keeps_its_size(sublayers, gain) -> None:
    """prod alpha / sqrt(alpha^2 + 1) over L sub-layers with alpha = L; Post-LN: 2^(-L/2)."""
    alpha = ARCHS["keel"].constants(Place("decoder", 0, "", 64, 0, sublayers // 2))["alpha"]
    assert (alpha / math.sqrt(alpha**2 + 1)) ** sublayers == pytest.approx(gain, abs=6e-7)
    if sublayers <= 24:
        assert 2 ** (-sublayers / 2) == pytest.approx({12: 1.5625e-2, 24: 2.44e-4}[sublayers], rel=2e-3)


def test_the_input_of_the_norms_has_variance_alpha_squared_plus_that_of_the_branch() -> None:
    model = build_model(arch="keel", stack="decoder", depth=6, d_model=512, d_ffn=2048, heads=8, source_vocab=37,
                        target_vocab=37)  # fmt: skip
    seen: dict[str, float] = {}
    for residual in list(model.residuals())[2:]:
        residual.norm.register_forward_pre_hook(
            lambda _norm, args, place=str(residual.place): seen.update({place: float(args[0].var(correction=0))})
        )
    with torch.no_grad():
        model(tokens=torch.arange(320).view(10, 32) % 37)
    assert len(seen) == 10
    for place, variance in seen.items():
        assert variance == pytest.approx(144 + (0.32 if place.endswith("ffn") else 0.1), rel=0.01), place
