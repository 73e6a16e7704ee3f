"""Layers that write into their input: what is read after that is left out, and its place is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probe_toys import ListSink
from torch import Tensor, nn

from stabilitylab.probes import Watcher

PROBES = "cosine_similarity,layer_branch,activation_grad_norm,residual_norm"


class Layer(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(6, 6), in_place

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x.clone()))
        if self.in_place:
            x += h
            return x
        return x + h


class Model(nn.Module):
    """``fresh``: what enters the layers is a tensor of its own, not a view, as a linear of three dimensions yields."""

    def __init__(self, in_place: tuple[bool, ...], fresh: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.fresh = nn.Linear(6, 6), nn.Linear(6, 3), fresh
        self.layers = nn.ModuleList(Layer(each) for each in in_place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x * 1.0 if self.fresh else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def recorded(in_place: tuple[bool, ...], fresh: bool, probes: str = PROBES) -> tuple[ListSink, Watcher]:
    model, sink = Model(in_place, fresh).double(), ListSink()
    given = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options: dict[str, Any] = {"reference": lambda: model(given), "update_every": 1, "every": 1, "strict": True}
    with Watcher(model, sink, probes=probes, **options) as watcher:
        for _ in range(2):
            model.zero_grad()
            loss = model(given).square().mean()
            loss.backward()
            watcher.step(loss=loss)
    return sink, watcher


def column(sink: ListSink, table: str, name: str = "") -> dict[str, float | None]:
    found = sink.column(1, table, name or sink.tables[table].main)
    return {site: None if site in sink.absent(1, table) else value for site, value in found.items()}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("in_place", [(True, True, True), (False, True, False), (False, False, True)])
def test_numbers_are_right_or_left_out_and_named(in_place: tuple[bool, ...], fresh: bool) -> None:
    """The truth is the same model without a write."""
    sink, watcher = recorded(in_place, fresh)
    truth, _ = recorded((False,) * 3, fresh)
    left_out: dict[str, set[str]] = {}
    for table in truth.tables:
        wanted = column(truth, table)
        for site, value in column(sink, table).items():
            if value is None:
                left_out.setdefault(table, set()).add(site)
            else:
                assert value == pytest.approx(wanted[site], rel=1e-12), (table, site)
    writing = {f"layers.{n}" for n, each in enumerate(in_place) if each}
    first = {"layers.input"} if in_place[0] else set()
    assert left_out.pop("cosine_similarity") == left_out.pop("layer_branch") == writing
    assert left_out.pop("residual_norm", set()) == first
    # with a view the gradient of what the layer before has returned is not seen whole
    before = {f"layers.{n - 1}" for n, each in enumerate(in_place) if each and n and in_place[n - 1]}
    assert left_out.pop("activation_grad_norm", set()) == (first if fresh else first | before)
    assert not left_out
    named = watcher.unseen
    assert set(named["cosine_similarity"]) == writing
    assert set(named.get("residual_norm", ())) == first


def test_the_gradient_of_a_view_is_left_out_where_nothing_else_is_read() -> None:
    sink, _ = recorded((True, True, True), False, "activation_grad_norm")
    truth, _ = recorded((False,) * 3, False, "activation_grad_norm")
    found, wanted = column(sink, "activation_grad_norm"), column(truth, "activation_grad_norm")
    assert [site for site, value in found.items() if value is None] == ["layers.input", "layers.0", "layers.1"]
    assert found["layers.2"] == pytest.approx(wanted["layers.2"], rel=1e-12)
