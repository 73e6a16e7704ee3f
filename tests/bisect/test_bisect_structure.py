"""Two models in other names: modules are paired by what they hold, so that a correct port is none that differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import HEADS, VOCAB, WIDTH, ids, loss_of
from rest_slow import rest_slow, slow
from torch import Tensor, nn

import stabilitylab as sl
from stabilitylab.errors import UsageError


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class FlatBlock(nn.Module):
    """All of its modules directly in it, the norms registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.f1, self.f2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        x = x + self.o(attended(self.q(y), self.k(y), self.v(y)))
        return x + self.f2(F.silu(self.f1(self.n2(x))))


class Fused(nn.Module):
    def __init__(self, one: FlatBlock) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), copy.deepcopy(one.o)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([own.weight for own in (one.q, one.k, one.v)]))
            self.qkv.bias.copy_(torch.cat([own.bias for own in (one.q, one.k, one.v)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(attended(*self.qkv(x).chunk(3, -1)))


class Separate(nn.Module):
    def __init__(self, one: FlatBlock) -> None:
        super().__init__()
        self.o, self.v, self.k, self.q = (copy.deepcopy(own) for own in (one.o, one.v, one.k, one.q))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attended(self.q(x), self.k(x), self.v(x)))


class Mlp(nn.Module):
    def __init__(self, one: FlatBlock) -> None:
        super().__init__()
        self.down, self.up, self.act = copy.deepcopy(one.f2), copy.deepcopy(one.f1), F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class NestedLayer(nn.Module):
    """The same, in modules of other names and in another order of registration."""

    def __init__(self, one: FlatBlock, attention: type[nn.Module]) -> None:
        super().__init__()
        self.attention, self.mlp = attention(one), Mlp(one)
        self.after, self.before = copy.deepcopy(one.n2), copy.deepcopy(one.n1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Stack(nn.Module):
    def __init__(self, names: tuple[str, str, str, str], parts: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.names = names
        for name, part in zip(names, parts, strict=True):
            self.add_module(name, part)

    def forward(self, tokens: Tensor) -> Tensor:
        embed, layers, norm, head = (self.get_submodule(name) for name in self.names)
        x = embed(tokens)
        for layer in layers:  # pyright: ignore
            x = layer(x)
        return head(norm(x))


def flat() -> Stack:
    torch.manual_seed(0)
    blocks = nn.ModuleList(FlatBlock() for _ in range(3))
    return Stack(
        ("emb", "blocks", "fn", "head"),
        (nn.Embedding(VOCAB, WIDTH), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)),
    )


def ported(one: Stack, attention: type[nn.Module]) -> Any:
    embed, blocks, norm, head = (copy.deepcopy(one.get_submodule(name)) for name in one.names)
    layers = nn.ModuleList(NestedLayer(block, attention) for block in blocks)  # pyright: ignore
    return Stack(("tok", "layers", "final", "unembed"), (embed, layers, norm, head))


@pytest.mark.parametrize("attention", rest_slow([Fused, Separate], [Fused]))
def test_a_correct_port_in_other_names_differs_by_rounding_alone(attention: type[nn.Module]) -> None:
    """Norms have equal gains and biases here, so that these do not tell which is which."""
    model = flat()
    other = ported(model, attention)
    assert torch.allclose(model(ids()), other(ids()), atol=1e-6)
    for second in (other, ported(model, attention).to(torch.bfloat16)):
        found = sl.bisect(model, second, ids(), loss_of)
        assert found.verdict in ("identical", "rounding")
        there = {place.name: place.other for place in (*found.places, *found.fed)}
        expected = {"n1": "before", "n2": "after", "o": "attention.proj" if attention is Fused else "attention.o"}
        expected |= {"f1": "mlp.up", "f2": "mlp.down"}
        for own, its in expected.items():
            for end in (":in", ":out", ".weight", ".bias"):
                assert there[f"blocks.1.{own}{end}"] == f"layers.1.{its}{end}"
        if attention is Separate:
            assert there["blocks.2.k.weight"] == "layers.2.attention.k.weight"
        assert "Some names differ: modules were paired by equal parameters" in str(found)


@pytest.mark.parametrize("maps", [slow(()), (r"^layers\.(\d)=blocks.\1", r"\.mlp\.up=.f1", r"\.after=.n2")])
def test_a_fault_of_such_a_port_is_named_in_the_names_of_both(maps: tuple[str, ...]) -> None:
    model = flat()
    other = ported(model, Fused)
    other.layers[1].mlp.act = F.relu
    found = sl.bisect(model, other, ids(), loss_of, maps=maps)
    assert (found.verdict, found.confirmed, found.where) == ("different", True, "blocks.1")
    assert found.first is not None
    assert (found.first.name, found.first.other) == ("blocks.1.f2:in", "layers.1.mlp.down:in")
    assert "enters in blocks.1 (in the second model layers.1.mlp, forward pass, confirmed)" in str(found)
    assert [place.name for place in found.fed if place.is_over(3.0)] == ["blocks.1.f2:in"]


@pytest.mark.slow
def test_other_parameters_in_other_names_are_said_to_differ() -> None:
    model = flat()
    other = ported(model, Separate)
    with torch.no_grad():
        other.tok.weight.mul_(1.5)
    found = sl.bisect(model, other, ids(), loss_of)
    assert found.first is not None
    assert (found.first.phase, found.first.name, found.first.other) == ("weights", "emb.weight", "tok.weight")


@pytest.mark.slow
def test_maps_that_cannot_work_and_those_that_do_nothing() -> None:
    model = flat()
    with pytest.raises(UsageError, match=r"cannot replace it \(invalid group reference 2"):
        sl.bisect(model, ported(model, Fused), ids(), loss_of, maps=(r"layers\.(\d)=blocks.\2",))
    found = sl.bisect(model, ported(model, Fused), ids(), loss_of, maps=("nosuch=emb",))
    assert "--map 'nosuch=emb' matches no name of the second model." in str(found)


@pytest.mark.slow
def test_a_number_that_is_not_finite_and_another_batch_are_said_first(caplog: pytest.LogCaptureFixture) -> None:
    model = flat()
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_submodule("blocks.1.f1").weight[0, 0] = torch.nan  # pyright: ignore
    found = sl.bisect(model, broken, ids(), loss_of)
    assert "Parameter blocks.1.f1.weight has a number that is not finite on one side" in str(found)
    found = sl.bisect(model, copy.deepcopy(model), ids(), loss_of, b_batch=ids(1))
    assert found.sentences()[1] == "The two sides have different batches, or one batch in two layouts."
    assert (
        found.sentences()[-1] == "Unless it is one batch in two layouts, give both the same batch, then compare again."
    )
    assert not caplog.records
