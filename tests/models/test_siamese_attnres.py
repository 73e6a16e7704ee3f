"""SiameseNorm and AttnRes: what each equals, and what holds exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_arch_formulas import Written, assert_equals_plain
from test_model_invariants import copy_weights, gradients
from torch import Tensor, nn

from stabilitylab.models import Place, Transformer, build_model
from stabilitylab.models.archs.attnres import Attending

SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 37, "target_vocab": 37}
BOTH = ["encoder-decoder", "decoder"]


def built(arch: str, depth: int = 6, stack: str = "decoder", **given: Any) -> Transformer:
    options = {"options": given.pop("options")} if "options" in given else {}
    return build_model(arch=arch, stack=stack, depth=depth, **SIZES, **options, **given)


def inputs_of(stack: str, pairs: dict[str, Tensor]) -> dict[str, Tensor]:
    return pairs if stack == "encoder-decoder" else {"tokens": pairs["target"], "mask": pairs["target_mask"]}


def without_eps(model: Transformer) -> Transformer:
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.eps = 0.0
    return model.double()


@pytest.mark.parametrize("stack", BOTH)
def test_siamese_norm_without_its_second_stream_is_postln_that_ends_as_residual_dual(stack, randomise, pairs) -> None:
    dual = randomise(built("resi-dual", 8, stack))
    siamese = built("siamese-norm", 8, stack, options={"depth_scale": "off", "inner": False})
    named = {name.replace("dual_norm", "plain_norm"): value for name, value in dual.state_dict().items()}
    missing, unexpected = siamese.load_state_dict(named, strict=False)
    assert not unexpected
    assert all(".plain_norm." in name for name in missing)
    for residual in siamese.residuals():
        nn.init.zeros_(residual.plain_norm.weight)
    postln = built("postln", 8, stack)
    postln.load_state_dict({name: value for name, value in dual.state_dict().items() if "dual_norm" not in name})
    inputs = inputs_of(stack, pairs)
    ends: list[Tensor] = []
    siamese.decoder.layers[-1].register_forward_hook(lambda _m, _x, y: ends.append(y[0]))
    assert torch.equal(siamese(**inputs), dual(**inputs))
    if stack == "decoder":  # else the encoder's end differs, and with it what cross-attention reads
        assert torch.equal(ends[0], postln.hidden(**inputs))


@pytest.mark.parametrize(("choice", "layer", "expected"), [("layer", 4, 0.5), ("twice", 2, 0.5), ("off", 9, 1.0)])
def test_the_depth_scale_of_siamese_norm(choice, layer, expected) -> None:
    model = built("siamese-norm", 9, options={"depth_scale": choice})
    assert float(model.decoder.layers[layer - 1].ffn.scale) == expected


@pytest.mark.parametrize("options", [{"depth_scale": "twice"}, {"depth_scale": "off"}])
def test_siamese_norm_equals_its_formula_with_other_scales(options, randomise, pairs) -> None:
    model = randomise(built("siamese-norm", 4, options=options).double())
    assert_equals_plain(model, pairs, Written(model))


def test_the_vector_of_attnres() -> None:
    (residual, *_) = build_model(arch="attnres", stack="decoder", depth=1, d_model=4, d_ffn=8, heads=1,
                                 source_vocab=5, target_vocab=5).double().residuals()  # fmt: skip
    assert isinstance(residual, Attending)
    sources = torch.tensor([[1, 2, 3, 4], [2, 0, 0, 0], [0, -1, 1, 0]], dtype=torch.float64)[:, None, None]
    residual.depth_query.data = torch.tensor([0.5, -0.5, 0.25, 0], dtype=torch.float64)
    shares = residual.shares(sources)
    expected = [0.163467653, 0.405584013, 0.430948334]
    np.testing.assert_allclose(shares.flatten().detach(), expected, rtol=0, atol=5e-6)  # an eps of 1e-5
    h = (shares * sources).sum(0).flatten().detach()
    np.testing.assert_allclose(h, [0.974635679, -0.104013028, 0.921351293, 0.653870612], rtol=0, atol=2e-5)


@pytest.mark.parametrize("stack", BOTH)
def test_attnres_starts_as_the_mean_of_all_outputs(stack, pairs) -> None:
    model = built("attnres", 6, stack).double()
    outputs: list[Tensor] = []
    for residual in model.residuals():
        if residual.place.stack == "decoder":
            residual.branch.register_forward_hook(lambda _m, _x, y: outputs.append(y))
    ends: list[Any] = []
    starts: list[Any] = []
    model.decoder.layers[0].register_forward_pre_hook(lambda _m, x: starts.append(x[0]))
    model.decoder.layers[-1].register_forward_hook(lambda _m, _x, y: ends.append(y))
    model(**inputs_of(stack, pairs))
    mean = torch.stack([starts[0][0], *outputs]).mean(0)
    torch.testing.assert_close(ends[0][0], mean, rtol=0, atol=1e-15)
    assert len(ends[0]) == 2 + len(outputs)  # what is read next, the embedding, and each output


def test_one_block_is_preln_over_2(pairs) -> None:
    preln = without_eps(built("preln", 6, norm="rmsnorm"))
    block = without_eps(built("attnres-block", 6, norm="rmsnorm", options={"blocks": 1}))
    _, unexpected = block.load_state_dict(preln.state_dict(), strict=False)
    assert not unexpected
    seen: list[Tensor] = []
    for model in (preln, block):
        model.decoder.layers[-1].register_forward_hook(
            lambda _m, _x, y: seen.append(y[0] if isinstance(y, tuple) else y)
        )
        model(tokens=pairs["target"])
    torch.testing.assert_close(2 * seen[1], seen[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("stack", BOTH)
def test_blocks_of_one_sublayer_are_attnres_in_full(stack, randomise, pairs) -> None:
    full = randomise(built("attnres", 6, stack))
    blocks = copy_weights(full, built("attnres-block", 6, stack, options={"blocks": 1000}))
    inputs = inputs_of(stack, pairs)
    assert torch.equal(full(**inputs), blocks(**inputs))


@pytest.mark.parametrize(
    ("depth", "blocks", "size", "sources"), [(6, 8, 2, 6), (12, 8, 3, 8), (100, 8, 25, 8), (3, 1, 6, 1)]
)
def test_the_blocks_of_attnres(depth, blocks, size, sources) -> None:
    model = build_model(arch="attnres-block", stack="decoder", depth=depth, options={"blocks": blocks}, **SIZES)
    opening = [residual.place.index for residual in model.residuals() if residual.opens]
    assert opening == list(range(0, 2 * depth, size))
    assert len(opening) == sources == math.ceil(2 * depth / size)
    given = Place("decoder", 0, "", 64, 0, depth)
    if blocks == 8:
        assert type(next(iter(model.residuals()))).constants(given) == {"sub-layers a block": size}


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_attnres_equals_its_formula_in_blocks(blocks, randomise, pairs) -> None:
    model = randomise(built("attnres-block", 4, options={"blocks": blocks}).double())
    assert_equals_plain(model, pairs, Written(model))


@pytest.mark.parametrize("arch", ["attnres", "attnres-block"])
def test_the_gain_of_keys_has_no_gradient_at_the_start_and_the_query_has(arch, pairs, loss_of) -> None:
    model = built(arch)
    found = gradients(model, loss_of(model, inputs_of("decoder", pairs)))
    assert not any(found[name].any() for name in found if name.endswith("depth_gain"))
    assert all(found[name].any() for name in found if name.endswith("depth_query"))


@pytest.mark.parametrize("arch", ["attnres", "attnres-block", "siamese-norm"])
def test_layers_that_are_computed_again_have_the_same_gradients(arch, pairs, loss_of) -> None:
    model = built(arch, 8, "encoder-decoder")
    expected = gradients(model, loss_of(model, pairs))
    for stack in model.stacks.values():
        stack.checkpointing = True
    again = gradients(model, loss_of(model, pairs))
    assert all(torch.equal(gradient, again[name]) for name, gradient in expected.items())
