"""Norm and variance of the residual stream in the training pass."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from probe_toys import Toy
from seen import batches, real_tokens, seen_by, training_of

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
