"""rms and largest size of norm gains."""

from __future__ import annotations

import math

import pytest
import torch
from probe_toys import ListSink, Toy
from torch import nn

from stabilitylab.errors import UsageError
from stabilitylab.models import build_model
from stabilitylab.probes import Watcher


def recorded(model: nn.Module) -> ListSink:
    sink = ListSink()
    watcher = Watcher(model, sink, probes="ln_gain", every=1)
    watcher.step()
    watcher.flush()
    watcher.close()
    return sink


def check(model: nn.Module, norms: list[str], dtype: torch.dtype = torch.float32) -> None:
    draw = torch.Generator().manual_seed(0)
    gains = {name: model.get_submodule(name).weight for name in norms}
    with torch.no_grad():
        for gain in gains.values():
            gain.copy_(torch.randn(gain.shape, generator=draw, dtype=torch.float64))
    sink, double = recorded(model), {name: gain.detach().double() for name, gain in gains.items()}
    rel = 1e-12 if dtype is torch.float64 else 1e-6
    rms = {name: gain.square().mean().sqrt().item() for name, gain in double.items()}
    assert sink.column(0, "ln_gain", "rms") == pytest.approx(rms, rel=rel)
    largest = {name: max(abs(entry) for entry in gain.tolist()) for name, gain in double.items()}
    assert sink.column(0, "ln_gain", "max_abs") == pytest.approx(largest, rel=rel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_norm_of_a_foreign_model(dtype: torch.dtype) -> None:
    model = Toy().to(dtype)
    check(model, [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)], dtype)


def test_the_reference_model_where_a_sub_layer_has_other_parameters_in_its_row() -> None:
    vocabularies = {"source_vocab": 9, "target_vocab": 9}
    model = build_model(arch="preln", encoder_layers=2, decoder_layers=1, d_model=8, d_ffn=8, heads=2, **vocabularies)
    sink = recorded(model)
    assert len(sink.tables["ln_gain"].rows) == 2 * 2 + 1 + 3 + 1
    assert set(sink.column(0, "ln_gain", "rms").values()) == {1.0}
    check(model, [row.site for row in sink.tables["ln_gain"].rows])


def test_norms_of_different_widths_of_other_kinds_and_without_a_gain() -> None:
    class T5LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

    model = nn.Sequential(nn.LayerNorm(3), nn.RMSNorm(4), T5LayerNorm(), nn.LayerNorm(3, elementwise_affine=False))
    check(model, ["0", "1", "2"])
    with pytest.raises(UsageError, match="probe 'ln_gain' finds no norm with a weight in this model"):
        recorded(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, elementwise_affine=False)))


def test_a_nan_stays_one() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))
    nn.init.constant_(model[1].weight, math.nan)
    for column in ("rms", "max_abs"):
        first, second = recorded(model).column(0, "ln_gain", column).values()
        assert first == pytest.approx(1.0)
        assert math.isnan(second)


def test_a_rank_that_holds_nothing_of_a_gain_leaves_the_maximum_to_the_others() -> None:
    class ShardedNorm(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((size,), 2.0))

    sink = recorded(nn.Sequential(ShardedNorm(3), ShardedNorm(0)))
    held, nothing = sink.column(0, "ln_gain", "max_abs").values()
    assert held == 2.0
    assert math.isnan(nothing)  # not recorded, which leaves it to other ranks
