"""Norm and variance of the residual stream in the training pass."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from probe_toys import ListSink, Toy
from seen import batches, real_tokens, seen_by, training_of
from torch import Tensor, nn

from stabilitylab.probes import Watcher

LAYERS = [f"{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("calls", [1, 3])
def test_norm_and_variance_of_each_place_with_padding_and_micro_batches(dtype: torch.dtype, calls: int) -> None:
    model, several = Toy().to(dtype), batches(calls)
    sink = training_of(model, several, "residual_norm")
    values = seen_by(model, several, LAYERS)
    for stack in ("encoder", "decoder"):
        values[f"{stack}.input"] = seen_by(model, several, {f"{stack}.layers.0": "input"})[f"{stack}.layers.0"]
    norms, variances = {}, {}
    for site, value in values.items():
        tokens = real_tokens(several, site.split(".")[0], value)
        norms[site] = statistics.fmean(math.hypot(*x) for x in tokens)
        variances[site] = statistics.fmean(statistics.pvariance(x) for x in tokens)
    rel = 1e-9 if dtype is torch.float64 else 1e-5
    assert sink.column(0, "residual_norm", "value") == pytest.approx(norms, rel=rel)
    assert sink.column(0, "residual_norm", "variance") == pytest.approx(variances, rel=rel)


def test_the_variance_after_a_post_ln_layer_is_one_by_construction() -> None:
    sink = training_of(Toy().double(), batches(1), "residual_norm")
    variances = sink.column(0, "residual_norm", "variance")
    assert [variances[layer] for layer in LAYERS] == pytest.approx([1.0] * 4, rel=1e-3)  # the eps of LayerNorm


class WideNorm(nn.LayerNorm):
    """Computes its variance in float64: in float32 it would overflow and make NaN of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.layer_norm(input.double(), (8,)).to(input.dtype) * self.weight + self.bias


class PreLN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = WideNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class LargeStream(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.layers, self.head = nn.ModuleList(PreLN() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x / self.scale)


@pytest.mark.parametrize("scale", [1e14, 1e20])
def test_a_norm_that_overflows_float32_is_not_blamed_on_the_computation_alone(scale: float) -> None:
    torch.manual_seed(0)
    model, x, sink = LargeStream(scale), scale * torch.randn(2, 5, 8), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Watcher(model, sink, every=1, optimizer=optimizer, reference=None) as watcher:
        model(x).sum().backward()
        watcher.step()
        optimizer.step()
    norms = x.double().norm(dim=-1)
    if scale < 1e19:
        assert watcher.incident is None
        assert sink.column(0, "ln_input", "value")["layers.0.norm"] == pytest.approx(float(norms.mean()), rel=1e-5)
        p99 = sink.column(0, "ln_input", "p99")["layers.0.norm"]
        assert float(norms.max()) / 2**0.5 <= p99 <= float(norms.max()) * 2**0.5
    else:
        assert watcher.incident is not None
        assert (watcher.incident.table, watcher.incident.value) == ("ln_input", "inf")
        assert "or its entries are finite and their norm is above 1.8e19" in watcher.incident.paragraph
