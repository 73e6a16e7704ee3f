"""Kurtosis and the largest entries, one token at a time in plain Python, and where they are known."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from probe_toys import Toy
from seen import batches, real_tokens, reference_of, seen_by

from stabilitylab.probes.library.outliers import kurtosis

LAYERS = [f"{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in range(2)]
ACTIVATIONS = [f"{layer}.linear2" for layer in LAYERS]


def expected(tokens: list[list[float]]) -> dict[str, float]:
    kurtoses, largest, over_rms, over_median = [], [], [], []
    for x in tokens:
        mu = statistics.fmean(x)
        variance = statistics.fmean((entry - mu) ** 2 for entry in x)
        kurtoses.append(statistics.fmean((entry - mu) ** 4 for entry in x) / variance**2)
        size = [abs(entry) for entry in x]
        largest.append(max(size))
        over_rms.append(max(size) / math.sqrt(statistics.fmean(entry**2 for entry in x)))
        over_median.append(max(size) / median if (median := statistics.median_low(size)) else math.inf)
    return {
        "pearson_kurtosis": statistics.fmean(kurtoses),
        "max_abs": max(largest),
        "max_over_rms": max(over_rms),
        "max_over_median": max(over_median),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("calls", [1, 2])
def test_every_layer_and_activation(dtype: torch.dtype, calls: int) -> None:
    model, several = Toy().to(dtype), batches(calls)
    sink = reference_of(model, several, "outliers")
    values = seen_by(model, several, dict.fromkeys(LAYERS, "output") | dict.fromkeys(ACTIVATIONS, "input"))
    assert {row.site for row in sink.tables["outliers"].rows} == set(values)
    for site, value in values.items():
        numbers = expected(real_tokens(several, site.split(".")[0], value))
        for column, number in numbers.items():
            recorded = sink.column(0, "outliers", column)[site]
            if column == "max_over_median" and site in ACTIVATIONS:
                assert math.isnan(recorded)
            else:
                assert recorded == pytest.approx(number, rel=1e-9 if dtype is torch.float64 else 1e-4)


def test_kurtosis_where_it_is_known() -> None:
    draw = torch.Generator().manual_seed(0)
    gaussian = torch.randn(1_000_000, generator=draw, dtype=torch.float64)
    assert kurtosis(gaussian).item() == pytest.approx(3, abs=0.03)
    assert kurtosis(torch.tensor([1.0, -1.0] * 4)).item() == 1.0
    one_hot = torch.eye(100, dtype=torch.float64)[0]
    p = 1 / 100
    assert kurtosis(one_hot).item() == pytest.approx((1 - 3 * p * (1 - p)) / (p * (1 - p)))
    assert kurtosis(torch.full((8,), 3.0)).item() == 0.0
    assert math.isnan(kurtosis(torch.tensor([1.0, math.nan, 2.0])).item())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_kurtosis_has_no_scale(scale: float) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(kurtosis(scale * x), kurtosis(x), rtol=1e-4)
