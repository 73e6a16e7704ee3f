"""Initial weights: constants, standard deviations, roles, and streams that depend on seed and role alone."""

from __future__ import annotations

import math
from itertools import product
from statistics import geometric_mean

import pytest
import torch
from rest_slow import rest_slow
from torch import Tensor
from torch.nn.functional import cross_entropy

from stabilitylab.config import DataConfig
from stabilitylab.data import load_data
from stabilitylab.models import ARCHS, Place, Transformer, build_model, deepnorm_constants

ENCODER_DECODER = """
1-1     0.810000 0.870000 1.316074 0.537285
6-6     1.417938 0.496989 2.059767 0.343295
12-12   1.760878 0.400198 2.449490 0.288675
18-18   1.998746 0.352571 2.710806 0.260847
50-50   2.750509 0.256207 3.499636 0.202052
60-12   2.633126 0.267629 2.449490 0.288675
100-100 3.415742 0.206310 4.161791 0.169904
250-250 4.548218 0.154940 5.233176 0.135120
500-500 5.648240 0.124765 6.223330 0.113622
"""
SINGLE = """
6 1.861210 .379918
12 2.213364 .319472
18 2.449490 .288675
24 2.632148 .268642
100 3.760603 .188030
200 4.472136 .158114
500 5.623413 .125743
1000 6.687403 .105737
"""
BASE = {"q": math.sqrt(0.5), "k": math.sqrt(0.5), "v": math.sqrt(0.5), "out": 1.0, "fc1": 1.0, "fc2": 1.0}


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize("row", rows(ENCODER_DECODER), ids=lambda row: row[0])
def test_deepnorm_constants_of_two_stacks(row) -> None:
    n, m = map(int, row[0].split("-"))
    found = (*deepnorm_constants("encoder", n, m), *deepnorm_constants("decoder", n, m))
    assert found == pytest.approx([float(value) for value in row[1:]], abs=6e-7)


@pytest.mark.parametrize("row", rows(SINGLE), ids=lambda row: row[0])
def test_deepnorm_constants_of_one_stack(row) -> None:
    expected = pytest.approx([float(value) for value in row[1:]], abs=6e-7)
    assert deepnorm_constants("encoder", int(row[0]), 0) == expected
    assert deepnorm_constants("decoder", 0, int(row[0])) == expected


def weights(model: Transformer) -> dict[str, Tensor]:
    """Role -> its tensor; fused matrices are cut."""
    named = dict(model.named_parameters())
    return {
        role: (named[name] if part is None else named[name][part]).detach()
        for role, (name, part) in model.parameter_roles().items()
    }


def expected_gain(arch: str, init: str, stack: str, layer: int, matrix: str) -> float:
    """Gains of a 6L-6L model."""
    rule, _, one = init.partition("-")
    if rule == "deepnorm" or (rule == "arch" and arch in ("deepnorm", "branchnorm")):
        return 1.0 if matrix in "qk" else {"encoder": 0.496989, "decoder": 0.343295}[stack]
    base = 1.0 if one else BASE[matrix]
    return base / (6 - layer + 1) if rule == "arch" and arch == "postln-init" else base


@pytest.mark.parametrize("init", rest_slow(["arch", "xavier", "deepnorm", "arch-1", "xavier-1"], ["arch", "xavier-1"]))
@pytest.mark.parametrize("arch", ["postln", "preln", "postln-init", "deepnorm", "branchnorm", "admin"])
def test_gains_of_every_matrix(arch, init) -> None:
    model = build_model(arch=arch, init=init, depth=12, source_vocab=9, target_vocab=9)
    unit = build_model(arch="postln", init="xavier", depth=12, source_vocab=9, target_vocab=9)
    drawn = weights(unit)
    seen = set()
    for role, weight in weights(model).items():
        parts = role.split(".")
        if role.endswith(".bias"):
            assert weight.count_nonzero() == 0, role
        elif parts[-1] in BASE:
            stack, layer, matrix = parts[0], int(parts[1]), parts[-1]
            ratio = expected_gain(arch, init, stack, layer, matrix) / BASE[matrix]
            torch.testing.assert_close(weight, drawn[role] * ratio, rtol=3e-6, atol=0)
            seen.add((stack, parts[2], matrix))
        elif parts[-1] in ("weight", "omega"):
            assert (weight == 1).all(), role
    assert len(seen) == 6 + 10  # encoder: qkvo, fc1, fc2; decoder: twice qkvo, fc1, fc2


@pytest.mark.parametrize(
    ("arch", "init", "q", "v", "out", "fc"),
    [
        ("postln", "arch", 0.5**0.5, 0.5**0.5, 1.0, 1.0),
        ("postln", "xavier-1", 1.0, 1.0, 1.0, 1.0),
        ("deepnorm", "arch", 1.0, None, None, None),
    ],
)
def test_standard_deviations_at_full_width(arch, init, q, v, out, fc) -> None:
    sizes = {"d_model": 512, "d_ffn": 2048, "heads": 8, "source_vocab": 2000, "target_vocab": 2000}
    model = build_model(arch=arch, init=init, depth=12, **sizes)
    for role, weight in weights(model).items():
        parts = role.split(".")
        if parts[-1] not in BASE:
            continue
        beta = {"encoder": 0.496989, "decoder": 0.343295}[parts[0]]
        gain = {"q": q, "k": q, "v": v, "out": out, "fc1": fc, "fc2": fc}[parts[-1]] or beta
        expected = gain * math.sqrt(2 / sum(weight.shape))
        assert float(weight.std()) == pytest.approx(expected, rel=0.01), role
        assert abs(float(weight.mean())) < 5 * expected / math.sqrt(weight.numel()), role
    for stack in model.stacks.values():
        assert float(stack.embedding.weight.detach().std()) == pytest.approx(512**-0.5, rel=0.01)


def test_qk_gain_replaces_the_gain_of_q_and_k_alone() -> None:
    sizes = {"depth": 4, "source_vocab": 9, "target_vocab": 9}
    plain, changed = (weights(build_model(arch="deepnorm", **sizes, **more)) for more in ({}, {"qk_gain": 0.25}))
    for role, weight in plain.items():
        factor = 0.25 if role.endswith((".q", ".k")) else 1.0
        torch.testing.assert_close(changed[role], weight * factor, rtol=1e-6, atol=0)


def test_v_gain_replaces_the_gain_of_v_alone() -> None:
    sizes = {"depth": 4, "source_vocab": 9, "target_vocab": 9}
    plain, changed = (weights(build_model(arch="postln", **sizes, **more)) for more in ({}, {"v_gain": 1.0}))
    for role, weight in plain.items():
        torch.testing.assert_close(changed[role], weight * (2**0.5 if role.endswith(".v") else 1), rtol=1e-6, atol=0)


def test_gain_1_is_that_of_q_k_and_v() -> None:
    sizes = {"arch": "postln", "depth": 4, "source_vocab": 9, "target_vocab": 9}
    one, given = (weights(build_model(**sizes, **more)) for more in ({"init": "xavier-1"}, {"qk_gain": 1, "v_gain": 1}))
    assert all(torch.equal(weight, given[role]) for role, weight in one.items())


@pytest.mark.parametrize(("init", "expected"), rest_slow([("arch", 0.39), ("xavier-1", 0.162)], [("arch", 0.39)]))
def test_gain_1_halves_how_much_gradient_reaches_the_first_decoder_layer_of_six(init, expected) -> None:
    """fc2's gradient there over that in the last layer; measured on these seeds, which differ by a factor of 1.5."""
    data = load_data(DataConfig(), stack="encoder-decoder")
    ratios = []
    for seed in (100, 101, 102):
        sizes = {"depth": 12, "d_model": 128, "d_ffn": 512, "heads": 4, "seed": seed}
        vocab = {"source_vocab": data.source_vocab, "target_vocab": data.target_vocab}
        model = build_model(arch="postln", init=init, **sizes, **vocab)
        batch = data.micro_batch(seed)
        real = batch.weight > 0
        cross_entropy(model(**batch.inputs)[real], batch.labels[real], label_smoothing=0.1).backward()
        named = dict(model.named_parameters())
        roles = (model.parameter_roles()[f"decoder.{layer}.ffn.fc2"][0] for layer in (1, 6))
        first, last = (float(named[name].grad.norm()) for name in roles)
        ratios.append(first / last)
    assert geometric_mean(ratios) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("arch", ["preln", "admin"])
def test_equal_gains_give_equal_bits_whatever_else_an_architecture_has(arch) -> None:
    sizes = {"depth": 4, "source_vocab": 9, "target_vocab": 11}
    postln, other = (weights(build_model(arch=name, **sizes)) for name in ("postln", arch))
    assert postln.keys() < other.keys()
    assert all(torch.equal(weight, other[role]) for role, weight in postln.items())


def test_numbers_depend_on_seed_and_role_alone() -> None:
    sizes = {"arch": "postln", "source_vocab": 9, "target_vocab": 11}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(build_model(depth=4, seed=3, **sizes))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, deeper = weights(build_model(depth=4, seed=3, **sizes)), weights(build_model(depth=8, seed=3, **sizes))
    assert all(torch.equal(weight, again[role]) and torch.equal(weight, deeper[role]) for role, weight in first.items())
    other = weights(build_model(depth=4, seed=4, **sizes))
    drawn = [role for role in first if role.split(".")[-1] in BASE or role.endswith("embedding")]
    assert len({weight.flatten()[0].item() for weight in map(first.__getitem__, drawn)}) == len(drawn)
    assert not any(torch.equal(first[role], other[role]) for role in drawn)


@pytest.mark.parametrize("tie", ["output", "all", "none"])
def test_shared_tables_carry_the_numbers_of_their_role(tie) -> None:
    sizes = {"arch": "postln", "depth": 2, "source_vocab": 11, "target_vocab": 11}
    untied, found = (weights(build_model(tie=name, **sizes)) for name in ("none", tie))
    tables = {role for role in found if role.endswith("embedding") or role == "output"}
    assert (
        tables
        == {
            "output": {"encoder.embedding", "decoder.embedding"},
            "all": {"decoder.embedding"},
            "none": {"encoder.embedding", "decoder.embedding", "output"},
        }[tie]
    )
    assert all(torch.equal(found[role], untied[role]) for role in tables)


@pytest.mark.parametrize(
    ("stack", "tie"),
    rest_slow(
        [("encoder-decoder", "all"), *product(["encoder-decoder", "encoder", "decoder"], ["output", "none"])],
        [("encoder-decoder", "all"), ("encoder", "none"), ("decoder", "output")],
    ),
)
@pytest.mark.parametrize(
    "switches", rest_slow([{}, {"qk_norm": True, "norm": "rmsnorm"}], [{}]), ids=["plain", "switched"]
)
@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_roles_partition_the_parameters(arch, stack, tie, switches, small) -> None:
    if stack not in ARCHS[arch].defined_for:
        return
    if arch.startswith("hybridnorm"):  # they have a norm of queries and keys of their own
        switches = {key: value for key, value in switches.items() if key != "qk_norm"}
    model = small(arch, stack=stack, tie=tie, **switches)
    covered = {name: torch.zeros(len(parameter)) for name, parameter in model.named_parameters()}
    for name, part in model.parameter_roles().values():
        covered[name][slice(None) if part is None else part] += 1
    assert all((counts == 1).all() for counts in covered.values())


def test_roles_are_spelled_as_documented(small) -> None:
    roles = small("admin", depth=2, decoder_arch="preln", tie="none").parameter_roles()
    both = [f"{kind}{bias}" for kind in ("q", "k", "v", "out") for bias in ("", ".bias")]
    ffn = [f"{kind}{bias}" for kind in ("fc1", "fc2") for bias in ("", ".bias")]
    norm = ["norm.weight", "norm.bias"]
    expected = {f"encoder.1.self_attn.{name}" for name in [*both, *norm, "omega"]}
    expected |= {f"encoder.1.ffn.{name}" for name in [*ffn, *norm, "omega"]}
    expected |= {f"decoder.1.{sublayer}.{name}" for sublayer in ("self_attn", "cross_attn") for name in [*both, *norm]}
    expected |= {f"decoder.1.ffn.{name}" for name in [*ffn, *norm]}
    expected |= {"decoder.norm.weight", "decoder.norm.bias", "encoder.embedding", "decoder.embedding", "output"}
    assert roles.keys() == expected
    assert roles["encoder.1.self_attn.k"] == ("encoder.layers.0.self_attn.f.qkv.weight", slice(16, 32))
    assert roles["decoder.1.cross_attn.v.bias"] == ("decoder.layers.0.cross_attn.f.kv.bias", slice(16, 32))
    assert roles["decoder.1.cross_attn.q"] == ("decoder.layers.0.cross_attn.f.q.weight", None)


def test_a_place_knows_its_stack() -> None:
    place = Place("decoder", 3, "ffn", 64, 12, 5)
    assert (str(place), place.layers) == ("decoder.3.ffn", 5)
