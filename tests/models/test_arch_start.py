"""How each architecture starts: constants, gains, extras, identities, variances; and that it trains."""

from __future__ import annotations

import math

import pytest
import torch
from rest_slow import MORE_ARCHS, rest_slow
from torch import Tensor

from stabilitylab.errors import UsageError
from stabilitylab.models import ARCHS, Place, Transformer, build_model

EVERY = sorted(ARCHS)
KINDS = MORE_ARCHS | {"mhc", "attnres", "siamese-norm"}
BASE = {"q": math.sqrt(0.5), "k": math.sqrt(0.5), "v": math.sqrt(0.5), "out": 1.0, "fc1": 1.0, "fc2": 1.0}
VOCAB = {"source_vocab": 37, "target_vocab": 37}


def weights(model: Transformer) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return {
        role: (named[name] if part is None else named[name][part]).detach()
        for role, (name, part) in model.parameter_roles().items()
    }


# layers a side: .67 N^-1/4, (9M)^-1/4; L^-1/2, L^-1/6 with L = 5N; gamma of the encoder, of the decoder
@pytest.mark.parametrize(
    ("layers", "tfixup", "rfixup", "subln"),
    [
        (6, (0.428092, 0.368894), (0.182574, 0.567300), (1.547288, 1.700109)),
        (18, (0.325279, 0.280299), (0.105409, 0.472382), (2.182857, 1.997244)),
        (100, (0.211873, 0.182574), (0.044721, 0.354954), (3.173875, 2.388259)),
        (500, (0.141688, 0.122095), (0.020000, 0.271442), (4.103573, 2.704297)),
    ],
)
def test_constants_of_two_equal_stacks(layers, tfixup, rfixup, subln) -> None:
    encoder, decoder = (Place(stack, 0, "", 64, layers, layers) for stack in ("encoder", "decoder"))
    for stack, value in ((encoder, tfixup[0]), (decoder, tfixup[1])):
        found = ARCHS["tfixup"].constants(stack)
        assert found == pytest.approx({"gain of v, out, fc1, fc2": value, "gain of the embedding": tfixup[1]}, abs=6e-7)
        fixup = ARCHS["rfixup"].constants(stack)
        assert fixup == pytest.approx({"gain of fc1": rfixup[0], "gain of q, k, v": rfixup[1]}, abs=6e-7)
    assert ARCHS["subln"].constants(encoder) == pytest.approx({"gamma": subln[0]}, abs=6e-7)
    assert ARCHS["subln"].constants(decoder) == pytest.approx({"gamma": subln[1]}, abs=6e-7)


@pytest.mark.parametrize(("layers", "gamma"), [(12, 1.782710), (24, 1.967537)])
def test_sub_ln_of_one_stack(layers, gamma) -> None:
    for place in (Place("encoder", 0, "", 64, layers, 0), Place("decoder", 0, "", 64, 0, layers)):
        assert ARCHS["subln"].constants(place) == pytest.approx({"gamma": gamma}, abs=6e-7)


def test_sublayers_are_counted_as_papers_do() -> None:
    counts = {(6, 6): 30, (100, 100): 500, (7, 0): 14, (0, 7): 14, (2, 5): 19}
    assert {sizes: Place("encoder", 0, "", 8, *sizes).sublayers for sizes in counts} == counts


DS_INIT = {1: (1.0, 1.0), 2: (0.707107, 0.840896), 6: (0.408248, 0.638943)}  # paper, code


def expected_gain(arch: str, stack: str, layer: int, sublayer: str, matrix: str) -> float:
    """Of a 6L-6L model, from the published vectors."""
    if arch == "dsinit":
        return BASE[matrix] * DS_INIT[layer][0]
    if arch == "dsinit-code":
        return (1.0 if sublayer == "cross_attn" else BASE[matrix]) * DS_INIT[layer][1]
    if arch == "rfixup":
        return {"out": 0.0, "fc2": 0.0, "fc1": 0.182574}.get(matrix, 0.567300 * BASE[matrix])
    if arch == "tfixup":
        return 1.0 if matrix in "qk" else {"encoder": 0.428092, "decoder": 0.368894}[stack]
    if arch == "subln":
        if matrix in "qk" or sublayer == "cross_attn":
            return 1.0
        return {"encoder": 1.547288, "decoder": 1.700109}[stack]
    return BASE[matrix]


@pytest.mark.parametrize("arch", [a for a in EVERY if a not in ("deepnorm", "branchnorm", "postln-init")])
def test_gains_of_every_matrix(arch) -> None:
    unit = weights(build_model(arch="postln", init="xavier", depth=12, **VOCAB))
    seen = set()
    for role, weight in weights(build_model(arch=arch, depth=12, **VOCAB)).items():
        stack, layer, *rest = role.split(".")
        if len(rest) == 2 and rest[1] in BASE and int(layer) in DS_INIT:
            gain = expected_gain(arch, stack, int(layer), *rest)
            torch.testing.assert_close(weight, unit[role] * (gain / BASE[rest[1]]), rtol=3e-6, atol=0)
            seen.add((stack, *rest))
        elif role.endswith(".bias"):
            assert weight.count_nonzero() == 0, role
    assert len(seen) == 16


def test_only_the_architectures_own_start_has_its_gains() -> None:
    for arch in ("dsinit", "rfixup", "tfixup", "subln"):
        plain, found = (weights(build_model(arch=name, init="xavier", depth=4, **VOCAB)) for name in ("postln", arch))
        assert all(torch.equal(plain[role], weight) for role, weight in found.items() if role in plain)


@pytest.mark.parametrize("tie", ["output", "none", "all"])
def test_embeddings_and_output_of_the_fixups(tie) -> None:
    sizes = {"encoder_layers": 2, "decoder_layers": 6, "tie": tie, **VOCAB}
    plain, tfixup, rfixup = (weights(build_model(arch=arch, **sizes)) for arch in ("postln", "tfixup", "rfixup"))
    encoder, decoder = (9 * 2) ** -0.25, (9 * 6) ** -0.25
    if tie == "all":  # the shared table has the encoder's gain
        torch.testing.assert_close(tfixup["decoder.embedding"], plain["decoder.embedding"] * encoder)
        assert torch.equal(rfixup["decoder.embedding"], plain["decoder.embedding"])
        return
    torch.testing.assert_close(tfixup["encoder.embedding"], plain["encoder.embedding"] * encoder)
    torch.testing.assert_close(tfixup["decoder.embedding"], plain["decoder.embedding"] * decoder)
    if tie == "none":
        assert torch.equal(tfixup["output"], plain["output"])
        assert rfixup["output"].count_nonzero() == 0


D, FFN, HEADS, N, M = 16, 32, 2, 3, 4
EXTRAS = {  # beyond the parameters of Post-LN, for an encoder of N and a decoder of M layers
    "preln": 2 * 2 * D,
    "admin": D * (2 * N + 3 * M),
    "rezero": N + M - 2 * D * (2 * N + 3 * M),
    "rfixup": 6 * N + 8 * M + 3 - 2 * D * (2 * N + 3 * M) - (5 * D + FFN) * (N + M) - 4 * D * M,
    "tfixup": -2 * D * (2 * N + 3 * M),
    "dlcl": (N + 1) ** 2 + (M + 1) ** 2 + 2 * D * (N + M) + 4 * D,
    "dlcl-post": (N + 1) ** 2 + (M + 1) ** 2 + 2 * D * (N + M),
    "normformer": (HEADS + 2 * D + 2 * FFN) * (N + M) + 4 * D,
    "subln": (2 * D + 2 * FFN) * (N + M) + 4 * D,
    "sandwich": 2 * D * (2 * N + 3 * M) + 4 * D,
    "periln": 2 * D * (2 * N + 3 * M) + 4 * D + 4 * D,
    "layernorm-scaling": 4 * D,
    "resi-dual": 4 * D,
    "gpas": N + M + 4 * D,
    "mix-ln": 4 * D,
    "completep": 4 * D,
    "hybridnorm": (N + 2 * M) * 3 * D // HEADS - 2 * D * (N + M) + 4 * D,
    "hybridnorm-star": (N + 2 * M) * 3 * D // HEADS - 2 * D * (N + M - 2) + 4 * D,
    "siamese-norm": 4 * D * (2 * N + 3 * M) + 4 * D,
    "attnres": 2 * D * (2 * N + 3 * M) + 4 * D,
    "attnres-block": 2 * D * (2 * N + 3 * M) + 4 * D,
    "hyper-connections-static": 4 * 6 * (2 * N + 3 * M) + 4 * D,  # n (n + 2), n = 4
    "hyper-connections": (4 * 6 + 6 * D + 2 + 2 * D) * (2 * N + 3 * M) + 4 * D,  # and d (n + 2) + 2, and a norm
    "mhc": (4 * D * 24 + 24 + 3) * (2 * N + 3 * M) + 4 * D,  # nC (n^2 + 2n) + n^2 + 2n + 3
    "keel": D * (2 * (2 * N + 3 * M) - 2) - 2 * D * (2 * N + 3 * M),  # two norms without biases, less one a stack
}


EXCHANGED = ("rezero", "rfixup", "keel", "hybridnorm", "hybridnorm-star")  # less than Post-LN has, and other parts


@pytest.mark.parametrize("arch", EVERY)
def test_learnable_extras_are_those_of_the_paper(arch) -> None:
    sizes = {"d_model": D, "d_ffn": FFN, "heads": HEADS, "encoder_layers": N, "decoder_layers": M, **VOCAB}
    counts = [sum(p.numel() for p in build_model(arch=name, **sizes).parameters()) for name in ("postln", arch)]
    assert counts[1] - counts[0] == EXTRAS.get(arch, 0)
    assert (ARCHS[arch].learns == "nothing") == (EXTRAS.get(arch, 0) <= 0 and arch not in EXCHANGED)


def entering(model: Transformer, stack: str, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(What enters the first layer of a stack, what the stack puts out)."""
    seen: list[Tensor] = []
    handles = [
        model.stacks[stack].layers[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0])),
        model.stacks[stack].register_forward_hook(lambda _m, _i, output: seen.append(output)),
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen[0], seen[1]


@pytest.mark.parametrize(("arch", "stack"), [(a, s) for a in ("rezero", "rfixup") for s in ARCHS[a].defined_for])
def test_an_identity_at_the_start_bit_for_bit(arch, stack, small, randomise, pairs) -> None:
    inputs = pairs if stack == "encoder-decoder" else {"tokens": pairs["target"], "mask": pairs["target_mask"]}
    model = small(arch, stack=stack, depth=12)
    for name in model.stacks:
        assert torch.equal(*entering(model, name, inputs))
    for name in model.stacks:
        assert not torch.equal(*entering(randomise(model), name, inputs))


def alive(model: Transformer, loss: Tensor) -> set[str]:
    """The last parts of the roles that have a gradient other than 0."""
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in named.values())
    return {role for role, (name, rows) in model.parameter_roles().items() if named[name][rows or ...].any()}


def test_rezero_starts_with_its_scalars(small, pairs, loss_of) -> None:
    model = small("rezero", tie="none")
    found = alive(model, loss_of(model, pairs))
    assert found == {"decoder.1.self_attn.scale", "decoder.2.self_attn.scale", "decoder.embedding", "output"}


@pytest.mark.parametrize("tie", ["output", "none"])
def test_rfixup_starts_with_the_matrices_that_are_zero(tie, small, pairs, loss_of) -> None:
    model = small("rfixup", tie=tie)
    found = alive(model, loss_of(model, pairs))
    if tie == "none":
        assert found == {"output"}
        return
    last = {"self_attn": "out", "cross_attn": "out", "ffn": "fc2"}
    zero = {f"decoder.{layer}.{sublayer}.{matrix}" for layer in (1, 2) for sublayer, matrix in last.items()}
    assert found == zero | {"decoder.embedding", "decoder.shift.b"}


def test_one_scalar_a_layer_wherever_it_is_used(small, pairs, loss_of) -> None:
    model = small("rezero").double()
    assert len([name for name, _ in model.named_parameters() if name.endswith("scale")]) == 4
    for layer in model.decoder.layers:
        assert layer.self_attn.scale is layer.cross_attn.scale is layer.ffn.scale
    assert model.encoder.layers[0].ffn.scale is not model.encoder.layers[1].ffn.scale


def copied(source: Transformer, target: Transformer) -> Transformer:
    missing, unexpected = target.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert missing
    return target


def test_head_scales_start_neutral(small, pairs) -> None:
    model = small("normformer")
    hidden = model.hidden(**pairs)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.self_attn.f.head_scale = None
    assert torch.equal(model.hidden(**pairs), hidden)


def test_peri_ln_is_sandwich_ln_over_a_normalised_embedding(small, pairs) -> None:
    sandwich = small("sandwich")
    peri = copied(sandwich, small("periln"))
    assert not torch.equal(peri(**pairs), sandwich(**pairs))
    for name in peri.stacks:
        peri.stacks[name].trunk = sandwich.stacks[name].trunk
    assert torch.equal(peri(**pairs), sandwich(**pairs))


def test_layernorm_scaling_is_preln_in_the_first_layer(small, pairs) -> None:
    for depth, same in ((2, True), (4, False)):
        models = [small(arch, depth=depth) for arch in ("preln", "layernorm-scaling")]
        assert torch.equal(models[0](**pairs), models[1](**pairs)) is same


def test_resi_dual_without_its_second_stream_is_postln(small, randomise, pairs) -> None:
    postln = randomise(small("postln"))
    both = copied(postln, small("resi-dual"))
    assert not torch.equal(both(**pairs), postln(**pairs))
    for stack in both.stacks.values():
        torch.nn.init.zeros_(stack.trunk.dual_norm.weight)
    assert torch.equal(both(**pairs), postln(**pairs))


def test_dlcl_that_looks_at_the_last_layer_alone(small, randomise, pairs) -> None:
    """W = 1 is not Pre-LN, but Pre-LN blocks over the norm of the layer below; Post-LN's form keeps a second norm."""
    for arch in ("dlcl", "dlcl-post"):
        model = randomise(small(arch))
        for stack in model.stacks.values():
            stack.trunk.combination.data = torch.eye(3)
        x = model.encoder.embed(pairs["source"])
        for layer, norm in zip(model.encoder.layers, model.encoder.trunk.history_norm, strict=True):
            x = norm(layer(x, None, None, None))
        x = x if model.encoder.norm is None else model.encoder.norm(x)
        assert torch.allclose(model.encoder(pairs["source"]), x, atol=1e-6)


def branches(arch: str, **settings) -> dict[str, float]:
    """Var of each branch of a wide encoder."""
    model = build_model(arch=arch, stack="encoder", depth=4, d_model=512, d_ffn=2048, heads=8, **VOCAB, **settings)
    seen: dict[str, float] = {}
    for residual in model.residuals():
        residual.branch.register_forward_hook(
            lambda _m, _i, y, place=str(residual.place): seen.update({place: float(y.var(correction=0))})
        )
    with torch.no_grad():
        model(tokens=torch.arange(320).view(10, 32) % 37)
    return seen


def test_branch_variances_at_the_start() -> None:
    gamma = math.sqrt(math.log(2 * 4))
    subln, sandwich, scaled = branches("subln"), branches("sandwich"), branches("layernorm-scaling")
    for layer in range(1, 5):
        assert subln[f"encoder.{layer}.self_attn"] == pytest.approx(gamma**2, rel=0.15)  # few distinct tokens
        assert subln[f"encoder.{layer}.ffn"] == pytest.approx(1.6 * gamma**2, rel=0.05)
        assert sandwich[f"encoder.{layer}.ffn"] == pytest.approx(1.0, rel=1e-3)
        assert scaled[f"encoder.{layer}.ffn"] == pytest.approx(0.32 / layer, rel=0.1)
    assert set(branches("rezero").values()) - {0.0}
    assert set(branches("rfixup").values()) == {0.0}


def test_tfixups_stream_starts_with_its_scaled_embedding_and_whole_positions() -> None:
    model = build_model(arch="tfixup", depth=12, d_model=512, heads=8, source_vocab=2000, target_vocab=9)
    x = model.encoder.embed(torch.randint(0, 2000, (50, 40), generator=torch.Generator().manual_seed(1)))
    assert float(x.detach().square().mean()) == pytest.approx(0.136 + 0.5, rel=0.01)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_tfixup_is_defined_for_two_stacks(stack) -> None:
    with pytest.raises(UsageError, match=rf"'tfixup' is not defined for model\.stack = '{stack}': .* another .*\.$"):
        build_model(arch="T-Fixup", stack=stack, depth=2, **VOCAB)


def first_steps(arch: str, depth: int, steps: int, pairs: dict[str, Tensor], loss_of, lr: float = 1e-4) -> list[float]:
    model = build_model(arch=arch, depth=depth, d_model=8, d_ffn=16, heads=2, T=10, **VOCAB)
    model.calibrate(**pairs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), fused=True)
    losses = []
    for step in range(steps):
        model.set_row(step)
        with torch.no_grad():
            assert model.hidden(**pairs).isfinite().all()
        loss = loss_of(model, pairs)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert all(p.isfinite().all() for p in model.parameters())
    return losses


@pytest.mark.parametrize("depth", rest_slow([6, 12], [6]))
@pytest.mark.parametrize("arch", rest_slow(EVERY, KINDS))
def test_shallow_ones_train(arch, depth, pairs, loss_of) -> None:
    losses, still = (first_steps(arch, depth, 4, pairs, loss_of, lr) for lr in (1e-4, 0.0))
    assert losses[0] == still[0]
    assert losses[-1] < still[-1]  # at the same row: a schedule's alpha moves the loss too


@pytest.mark.slow
@pytest.mark.parametrize("arch", rest_slow(EVERY, (), KINDS))
def test_200_layers_take_steps_on_finite_numbers(arch, pairs, loss_of) -> None:
    assert all(math.isfinite(loss) for loss in first_steps(arch, 200, 2, pairs, loss_of))
