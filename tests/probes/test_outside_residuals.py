"""Layers that return a branch, to which the model adds the residual: their outputs are not read as the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher
from stabilitylab.probes._engine import outside

STREAM = "residual_norm,histograms_activation,cosine_similarity,outliers,rank,layer_branch"
PROBES = f"{STREAM},activation_grad_norm"
Forward = Callable[["Net", Tensor], tuple[Tensor, list[Tensor]]]  # the result, and the stream behind each layer


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Four lists of modules, used as ``walk`` says."""

    def __init__(self, walk: Forward, pairs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        blocks = [nn.ModuleList([Branch(), Branch()]) if pairs else Branch() for _ in range(3)]
        self.layers = nn.ModuleList(blocks)
        self.before = nn.ParameterList([torch.rand(8) for _ in range(3)])  # gains of norms
        self.after = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.gate, self.head = nn.Parameter(torch.rand(8)), nn.Linear(8, 1)
        self.walk, self.stream = walk, []

    def forward(self, x: Tensor) -> Tensor:
        x, self.stream = self.walk(self, self.embed(x))
        return self.head(x)


def walk(step: Callable[[Net, int, Any, Tensor, Tensor], Tensor]) -> Forward:
    """Walk through the layers. ``step``: net, index, layer, stream, first stream -> stream."""

    def walked(net: Net, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        first, stream = x, []
        for index, layer in enumerate(net.layers):
            x = step(net, index, layer, x, first)
            stream.append(x)
        return x, stream

    return walked


def rms(net: Net, index: int, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * net.before[index]


def in_pairs(net: Net, index: int, layer: Any, x: Tensor, first: Tensor) -> Tensor:
    x = layer[0](x) + x
    return layer[1](x) + x


def post_norm(net: Net, index: int, layer: Any, x: Tensor, first: Tensor) -> Tensor:
    return net.after[index](x + F.dropout(layer(x), 0.1, net.training))


def added(net: Net, index: int, layer: Any, x: Tensor, first: Tensor) -> Tensor:
    y = layer(x)
    y += x
    return y


OUTSIDE = {
    "x + layer(x)": walk(lambda net, index, layer, x, first: x + layer(x)),
    "in place": walk(added),
    "dropout": walk(lambda net, index, layer, x, first: F.dropout(layer(x), 0.1, net.training) + x),
    "a factor": walk(lambda net, index, layer, x, first: x + net.gate * layer(x)),
    "a norm before": walk(lambda net, index, layer, x, first: x + layer(rms(net, index, x))),
    "a norm behind": walk(post_norm),
    "pairs": walk(in_pairs),
}
INSIDE = {
    "the stream": walk(lambda net, index, layer, x, first: layer(x)),
    "dropout": walk(lambda net, index, layer, x, first: F.dropout(layer(x), 0.1, net.training)),
    "a norm": walk(lambda net, index, layer, x, first: net.after[index](layer(x))),
    "a norm by hand": walk(lambda net, index, layer, x, first: rms(net, index, layer(x))),
    "a factor": walk(lambda net, index, layer, x, first: layer(x) * net.gate),
    "the first stream": walk(lambda net, index, layer, x, first: layer(x) + first),
    "positions": walk(lambda net, index, layer, x, first: layer(x) + net.gate),
    "a mean with the input": walk(lambda net, index, layer, x, first: layer(x) * net.gate + x * (1 - net.gate)),
    "one layer of three": walk(lambda net, index, layer, x, first: layer(x) + x if index == 0 else layer(x)),
}


def trained(
    net: Net, watched: bool, probes: str = PROBES, **more: Any
) -> tuple[ListSink, Watcher | None, list[Tensor]]:
    """Train two updates; return what was recorded, and all losses and weights."""
    net, sink = net.double(), ListSink()
    given = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    options: dict[str, Any] = {"reference": lambda: net(given), "update_every": 1, "every": 1, "strict": True, **more}
    watcher = Watcher(net, sink, probes=probes, **options) if watched else None
    torch.manual_seed(2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(given).square().mean()
        found.append(loss.detach())
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
    if watcher is not None:
        watcher.flush()
        watcher.close()
    return sink, watcher, [*found, *(each.detach() for each in net.parameters())]


LAYERS = {f"layers.{index}" for index in range(3)}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_branch_has_no_row_in_tables_of_the_stream_and_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    sink, watcher, _ = trained(Net(OUTSIDE[name], pairs=name == "pairs"), watched=True)
    assert watcher is not None
    for table in STREAM.split(","):
        for row in (0, 1):
            assert sink.absent(row, table) >= LAYERS, f"{table}, row {row}"
        assert set(watcher.unseen[table]) >= LAYERS, table
    assert ("activation_grad_norm" in watcher.unseen) == (name == "in place")  # into a view: that is left out anyway
    assert "the residual is added outside of the layers" in caplog.text
    assert "layers.input" not in sink.absent(0, "residual_norm")


@pytest.mark.parametrize("name", INSIDE)
def test_what_a_layer_returns_is_the_stream_without_a_proof(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The truth is what each layer returned in the update, in float64."""
    net, seen = Net(INSIDE[name]), []
    for layer in net.layers:
        layer.register_forward_hook(lambda module, args, y: seen.append(y.detach().norm(dim=-1).mean().item()))
    sink, watcher, _ = trained(net, watched=True, probes="residual_norm,activation_grad_norm")
    found = sink.column(0, "residual_norm", "value")
    assert [found[layer] for layer in sorted(LAYERS)] == pytest.approx(seen[:3], rel=1e-12)
    assert watcher is not None
    assert not watcher.unseen
    assert "outside" not in caplog.text


def test_the_gradient_of_a_branch_is_that_of_the_sum() -> None:
    sink, _, _ = trained(Net(OUTSIDE["x + layer(x)"]), watched=True)
    net = Net(OUTSIDE["x + layer(x)"]).double()
    given = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = net(given).square().mean()
    true = [gradient.norm().item() for gradient in torch.autograd.grad(loss, net.stream)]
    found = sink.column(0, "activation_grad_norm", "value")
    assert [found[layer] for layer in sorted(LAYERS)] == pytest.approx(true, rel=1e-12)


class Own(torch.autograd.Function):
    """An operator of somebody's own, which hands its input on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_operators_of_the_callers_own_are_walked_past() -> None:
    own = walk(lambda net, index, layer, x, first: Own.apply(x + layer(x)))
    sink, _, _ = trained(Net(own), watched=True, probes="residual_norm")
    assert sink.absent(0, "residual_norm") == LAYERS


def test_a_graph_that_cannot_be_read_ends_the_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(node: Any) -> set[Any]:
        raise RuntimeError("made up")

    monkeypatch.setattr(outside, "handed_on", fail)
    sink, watcher, _ = trained(Net(OUTSIDE["x + layer(x)"]), watched=True, probes="residual_norm")
    assert watcher is not None
    assert not watcher.unseen
    assert not sink.absent(0, "residual_norm")


@pytest.mark.parametrize("named", [False, True])
def test_an_output_that_is_a_branch_has_a_row_if_the_caller_names_it(named: bool) -> None:
    options = {"output_site": "layers.2"} if named else {}
    sink, watcher, _ = trained(
        Net(OUTSIDE["x + layer(x)"]), watched=True, probes="output_norm,residual_norm", **options
    )
    assert watcher is not None
    assert ("output_norm" in watcher.unseen) is not named
    assert bool(sink.absent(0, "output_norm")) is not named


def test_frozen_layers_prove_nothing() -> None:
    net = Net(OUTSIDE["x + layer(x)"])
    for part in (net.embed, *net.layers):
        part.requires_grad_(False)
    sink, watcher, _ = trained(net, watched=True, probes="residual_norm")
    assert watcher is not None
    assert not watcher.unseen
    assert not sink.absent(0, "residual_norm")


@pytest.mark.parametrize("name", OUTSIDE)
def test_looking_for_the_residual_changes_no_bit(name: str) -> None:
    _, _, bare = trained(Net(OUTSIDE[name], pairs=name == "pairs"), watched=False)
    _, _, watched = trained(Net(OUTSIDE[name], pairs=name == "pairs"), watched=True)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
