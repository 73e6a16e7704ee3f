"""The plug-in with two streams, written by following docs/own-arch.md alone: its formula, and what probes read."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stabilitylab.models import ARCHS, Transformer, build_model
from stabilitylab.probes import Watcher

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin" / "stabilitylab_example" / "streams.py"
SIZES: dict[str, Any] = {"d_model": 16, "d_ffn": 32, "heads": 2, "source_vocab": 11, "target_vocab": 11}


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    with ARCHS.restored():
        runpy.run_path(str(EXAMPLE), run_name="streams")
        yield


def built(depth: int = 6, k: float = 0.75) -> Transformer:
    return build_model(arch="tracks", stack="decoder", depth=depth, options={"k": k}, **SIZES).double()


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


def test_it_is_its_formula() -> None:
    model = built()
    branches: list[tuple[np.ndarray, np.ndarray]] = []  # of each sub-layer: what F reads, and F
    for residual in model.residuals():
        residual.f.register_forward_hook(lambda _m, x, y: branches.append((x[0].detach().numpy(), y.detach().numpy())))
    starts: list[np.ndarray] = []
    model.decoder.layers[0].register_forward_pre_hook(lambda _m, x: starts.append(x[0][0].detach().numpy()))
    hidden = model.hidden(tokens=tokens()).detach().numpy()
    a = b = starts[0]
    for number, (entering, branch) in enumerate(branches):
        own, other = (b, a) if number % 2 else (a, b)
        np.testing.assert_allclose(entering, norm(0.75 * own + 0.25 * other), rtol=0, atol=1e-12)
        a, b = (a, b + branch) if number % 2 else (a + branch, b)
    np.testing.assert_allclose(hidden, norm((a + b) / 2), rtol=0, atol=1e-12)
    assert len(branches) == 12


def test_with_k_of_a_half_its_mean_is_a_preln_of_halved_branches() -> None:
    """Both sub-layers read the mean m then, and m <- m + F(LN(m)) / 2: CompleteP of twice the base depth."""
    model = built(4, 0.5)
    halved = build_model(arch="completep", stack="decoder", depth=4, options={"base_layers": 2}, **SIZES).double()
    halved.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens=tokens()), halved(tokens=tokens()), rtol=0, atol=1e-12)
    expected, found = recorded(halved), recorded(model)
    for table, column in (
        ("residual_norm", "value"),
        ("activation_grad_norm", "value"),
        ("cosine_similarity", "raw"),
        ("branch_variance", "branch"),
        ("branch_variance", "shortcut"),
        ("branch_variance", "total"),
    ):
        assert found[table, column] == pytest.approx(expected[table, column], rel=1e-10), (table, column)
    assert len(found["residual_norm", "value"]) == 9


class Sink:
    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[float]] = {}

    def open(self, tables: Any) -> None:
        self.tables = {table.name: table for table in tables}

    def append(self, step: int, metrics: Any, tables: Any) -> None:
        if step == 0:
            for name, cells in tables.items():
                for number, column in enumerate(self.tables[name].columns):
                    self.found[name, column] = cells.values[:, number].tolist()

    def close(self) -> None: ...


def recorded(model: Transformer) -> dict[tuple[str, str], list[float]]:
    sink = Sink()
    probes = "residual_norm,activation_grad_norm,cosine_similarity,branch_variance"
    watcher = Watcher(model, sink, probes=probes, every=1, update_every=1, reference=lambda: model(tokens=tokens()))
    model(tokens=tokens()).logsumexp(-1).square().mean().backward()
    watcher.step()
    watcher.flush()
    return sink.found


@pytest.mark.parametrize("depth", [6, 12])
def test_it_trains(depth: int) -> None:
    model = build_model(arch="tracks", stack="decoder", depth=depth, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, losses = tokens(), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens=ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    assert "streams" not in sys.modules
