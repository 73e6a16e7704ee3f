"""Layers that take or return several tensors: which of them is read as the stream."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher

LAYERS = ["layers.0", "layers.1", "layers.2"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def add(self, x: Tensor, c: Any = 0) -> Tensor:
        return x + torch.tanh(self.linear(x + c))


class Points(Block):
    """PointTransformer: [p, x] -> [p, x]."""

    def forward(self, px: list[Tensor]) -> list[Tensor]:
        p, x = px
        return [p, self.add(x, p.mean(-1, keepdim=True))]


class Both(Block):
    """Flux, SD3: the text comes back first."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.add(hidden_states, encoder_hidden_states.mean(1, keepdim=True))
        return encoder_hidden_states + self.other(encoder_hidden_states), x


class Conditioned(Block):
    """The condition comes first."""

    def forward(self, cond: Tensor, x: Tensor) -> Tensor:
        return self.add(x, self.other(cond))


class Positions(Block):
    """T5: the stream, and a bias that is handed on."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return self.add(x, bias.mean()), bias


class InPlace(Block):
    """The stream is written to and returned, with what the layer looked at, which has the shape of another argument."""

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        x += torch.tanh(self.linear(x.clone()))
        return x, bias + 1


class TextFirst(Block):
    """Two streams that both change: nothing says which is meant, and the first tensors are read."""

    def forward(self, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return c + self.other(c), self.add(x, c.mean(1, keepdim=True))


class Net(nn.Module):
    def __init__(self, kind: type[Block], keywords: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.kind, self.keywords = nn.Linear(8, 8), nn.Linear(8, 1), kind, keywords
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.states: list[Tensor] = []

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = self.embed(x) * 1.0
        self.states = [x.detach().clone()]
        for layer in self.layers:
            if self.kind is Points:
                other, x = layer([other, x])
            elif self.kind is Both:
                other, x = layer(hidden_states=x, encoder_hidden_states=other)
            elif self.kind is Conditioned:
                x = layer(cond=other, x=x) if self.keywords else layer(other, x)
            elif self.kind is TextFirst:
                other, x = layer(other, x)
            else:
                x, other = layer(x, other)
            self.states.append((other if self.kind is TextFirst else x).detach().clone())
        return self.head(x)


def given_to(kind: type[Block]) -> Tensor:
    shape = {Points: (4, 5, 3), Both: (4, 7, 8), Conditioned: (4, 5, 8), TextFirst: (4, 7, 8)}.get(kind, (4, 2, 5, 5))
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def trained(net: Net, watched: bool = True) -> tuple[ListSink, list[list[Tensor]], list[Tensor]]:
    """Train two updates; return what was recorded, the streams of each, and all losses and weights."""
    net, sink, streams, found = net.double(), ListSink(), [], []
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = x, given_to(net.kind)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    options: dict[str, Any] = {"reference": lambda: net(*given), "update_every": 1, "every": 1, "strict": True}
    probes = "residual_norm,cosine_similarity"
    watcher = Watcher(net, sink, probes=probes, **options) if watched else None
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(*given).square().mean()
        streams.append(net.states)
        found.append(loss.detach())
        loss.backward()
        if watcher is not None:
            watcher.step(loss=loss)
        optimizer.step()
    if watcher is not None:
        watcher.flush()
        watcher.close()
    return sink, streams, [*found, *(each.detach() for each in net.parameters())]


def norms(states: list[Tensor]) -> list[float]:
    return [state.norm(dim=-1).mean().item() for state in states]


def cosines(states: list[Tensor]) -> list[float]:
    return [nn.functional.cosine_similarity(x, y, dim=-1).mean().item() for x, y in pairwise(states)]


@pytest.mark.parametrize("kind", [Points, Both])
@pytest.mark.parametrize("row", [0, 1])
def test_the_tensor_that_the_layer_makes_of_its_stream_is_read(kind: type[Block], row: int) -> None:
    sink, streams, _ = trained(Net(kind))
    found = sink.column(row, "residual_norm", "value")
    assert [found[name] for name in ("layers.input", *LAYERS)] == pytest.approx(norms(streams[row]), rel=1e-12)
    cosine = sink.column(row, "cosine_similarity", "raw")
    assert [cosine[name] for name in LAYERS] == pytest.approx(cosines(streams[row]), rel=1e-12)


@pytest.mark.parametrize("keywords", [False, True])
def test_what_the_layer_before_returned_is_what_enters(keywords: bool) -> None:
    """Nothing says which tensor is the stream of the first layer: its first tensor is read, as ever."""
    sink, streams, _ = trained(Net(Conditioned, keywords))
    found = sink.column(0, "residual_norm", "value")
    assert [found[name] for name in LAYERS] == pytest.approx(norms(streams[0][1:]), rel=1e-12)
    cosine = sink.column(0, "cosine_similarity", "raw")
    assert [cosine[name] for name in LAYERS[1:]] == pytest.approx(cosines(streams[0])[1:], rel=1e-12)


@pytest.mark.parametrize("kind", [Positions, InPlace, TextFirst])
def test_the_first_tensor_is_read_where_nothing_decides(kind: type[Block]) -> None:
    sink, streams, _ = trained(Net(kind))
    found = sink.column(0, "residual_norm", "value")
    assert [found[name] for name in LAYERS] == pytest.approx(norms(streams[0][1:]), rel=1e-12)
    if kind is not InPlace:  # which leaves nothing to compare with
        cosine = sink.column(0, "cosine_similarity", "raw")
        first = [given_to(kind) if kind is TextFirst else streams[0][0], *streams[0][1:]]
        assert [cosine[name] for name in LAYERS] == pytest.approx(cosines(first), rel=1e-12)


@pytest.mark.parametrize("kind", [Points, Both, Conditioned, Positions, InPlace, TextFirst])
def test_the_choice_changes_no_bit(kind: type[Block]) -> None:
    _, _, bare = trained(Net(kind), watched=False)
    _, _, watched = trained(Net(kind))
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
