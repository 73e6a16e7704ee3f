"""Adam's edge with parameter groups of different rates, against closed forms of quadratics in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from curvature_toys import numbers, recorded
from test_curvature import dense, made
from torch import Tensor, nn

from stabilitylab.probes.curvature import adam_preconditioner, relative_rates
from stabilitylab.probes.library.preconditioned_sharpness import OfTheHessian


@pytest.fixture
def finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanczos until the numbers are those of the dense matrix."""
    monkeypatch.setattr(OfTheHessian, "tolerance", 1e-11)
    monkeypatch.setattr(OfTheHessian, "cold", 80)


CURVATURES = (3.0, 0.5, 8.0, 0.02)


class Bowl(nn.Module):
    """0.5 sum_i h_i x_i^2, each x_i a parameter of its own."""

    def __init__(self, curvatures: tuple[float, ...] = CURVATURES) -> None:
        super().__init__()
        starts = [1.0, -2.0, 0.3, 4.0]
        self.x = nn.ParameterList(nn.Parameter(torch.tensor([s], dtype=torch.float64)) for s in starts)
        self.h = curvatures

    def forward(self) -> Tensor:
        return torch.stack([0.5 * h * x.square().sum() for h, x in zip(self.h, self.x, strict=True)]).sum()


def grouped(model: Bowl, rates: tuple[float, ...], **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [x], "lr": rate} for x, rate in zip(model.x, rates, strict=True)]
    return torch.optim.Adam(groups, lr=123.0, **options)


def row(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, at: int = 0) -> dict:
    sink = recorded(model, loss, optimizer, steps=at + 1, probes="preconditioned_sharpness")
    return numbers(sink, at, "preconditioned_sharpness")


@pytest.mark.usefixtures("finely")
@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("rates", [(0.1, 1e-3, 1e-3, 1e-3), (1e-4, 0.3, 2e-3, 5e-3), (0.01,) * 4, (0.0, 0.1, 0.0, 0.2)])
def test_of_a_quadratic_each_rate_stands_in_the_preconditioner(rates: tuple[float, ...], beta1: float) -> None:
    """At the first update P = (1 - beta1) (|g| + eps), so that to_edge is max_i lr_i h_i / P_i (1 - b) / (2 + 2 b)."""
    model = Bowl()
    found = row(model, model, grouped(model, rates, betas=(beta1, 0.99), eps=1e-3))
    h, x = np.array(CURVATURES), np.array([1.0, -2.0, 0.3, 4.0])
    P = (1 - beta1) * (np.abs(h * x) + 1e-3)
    exact = float(np.max(np.array(rates) * h / P)) * (1 - beta1) / (2 + 2 * beta1)
    assert found["converged"] == 1
    assert found["to_edge"] == pytest.approx(exact, rel=1e-9)
    assert found["value"] == pytest.approx(float(np.max(np.array(rates) / max(rates) * h / P)), rel=1e-9)


@pytest.mark.usefixtures("finely")
@pytest.mark.parametrize("beta1", [0.9, 0.5])
@pytest.mark.parametrize("off", [0.99, 1.01])
def test_beyond_it_momentum_with_these_rates_is_unstable_and_below_it_is_not(beta1: float, off: float) -> None:
    """With P held fixed, x' = x - lr_g m' / P and m' = b m + (1 - b) h x: the spectral radius crosses 1 where to_edge
    does."""
    rates = (0.1, 0.02, 0.001, 0.5)
    model = Bowl()
    optimizer = grouped(model, rates, betas=(beta1, 0.999), eps=1e-6)
    edge = row(model, model, optimizer)["to_edge"]
    P = [float(optimizer.state[x]["exp_avg_sq"].sqrt() / (1 - 0.999) ** 0.5 + 1e-6) * (1 - beta1) for x in model.x]
    radii = []
    for h, p, rate in zip(CURVATURES, P, rates, strict=True):
        step = off / edge * rate / p
        matrix = np.array([[1 - step * (1 - beta1) * h, -step * beta1], [(1 - beta1) * h, beta1]])
        radii.append(float(np.abs(np.linalg.eigvals(matrix)).max()))
    assert (max(radii) > 1) is (off > 1)


@pytest.mark.usefixtures("finely")
def test_a_small_rate_for_the_sharpest_group_takes_it_away_from_the_edge() -> None:
    """Of .142 by the largest rate, .040 are left by the rates that there are."""
    model = Bowl((3.0, 0.5, 8.0, 0.02))
    same = row(model, model, grouped(model, (1.0,) * 4, eps=1e-12))
    assert same["to_edge"] == pytest.approx(1 / 0.3 / 0.1 / 38)  # x_2 = 0.3 is nearest to its minimum
    scale = 0.142 / same["to_edge"]
    other = Bowl((3.0, 0.5, 8.0, 0.02))
    rates = (scale / 4, scale, scale * 0.040 / 0.142, scale)  # the second's, the largest, is half as far from the edge
    found = row(other, other, grouped(other, rates, eps=1e-12))
    assert found["to_edge"] == pytest.approx(0.040, rel=1e-9)


@pytest.mark.usefixtures("finely")
@pytest.mark.parametrize("name", ["perceptron", "attention"])
def test_of_a_network_it_is_the_largest_eigenvalue_of_the_dense_matrix(name: str) -> None:
    model, loss = made(name)
    parameters = list(model.parameters())
    rates = [1e-2 * 3.0**-n for n in range(len(parameters))]
    hessian = dense(model, loss)
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)], betas=(0.8, 0.95), eps=1e-4
    )
    found = row(model, loss, optimizer)
    second = np.concatenate([optimizer.state[p]["exp_avg_sq"].flatten().numpy() for p in parameters])
    lr = np.concatenate([np.full(p.numel(), rate) for p, rate in zip(parameters, rates, strict=True)])
    D = np.sqrt(lr / (0.2 * (np.sqrt(second / 0.05) + 1e-4)))
    exact = np.linalg.eigvalsh(D[:, None] * hessian * D[None, :])[-1] * 0.2 / 3.6
    assert found["to_edge"] == pytest.approx(exact, rel=1e-6)


def test_rates_of_another_optimizer_say_nothing_of_adams_edge() -> None:
    model, twin = Bowl(), Bowl()
    alone = torch.optim.Adam([{"params": list(twin.x)[:2], "lr": 0.1}], eps=1e-3)
    adam = torch.optim.Adam([{"params": list(model.x)[:2], "lr": 0.1}], eps=1e-3)
    sgd = torch.optim.SGD(list(model.x)[2:], lr=7.0)
    for own, optimizers in ((model, [adam, sgd]), (twin, [alone])):
        sinks = _one_update(own, optimizers)
        own.found = numbers(sinks, 0, "preconditioned_sharpness")
    assert model.found["to_edge"] == pytest.approx(twin.found["to_edge"])


def _one_update(model: Bowl, optimizers: list[torch.optim.Optimizer]) -> Any:
    from probe_toys import ListSink

    from stabilitylab.probes import Watcher

    sink = ListSink()
    options: dict[str, Any] = {"curvature_every": 1, "curvature_loss": model, "strict": True}
    with Watcher(model, sink, probes="preconditioned_sharpness", optimizer=optimizers, **options) as watcher:
        loss = model()
        loss.backward()
        watcher.step(loss=loss)
        for optimizer in optimizers:
            optimizer.step()
    return sink


def test_groups_that_differ_in_beta1_have_no_known_edge() -> None:
    model = Bowl()
    groups = [{"params": [x], "betas": (beta, 0.99)} for x, beta in zip(model.x, (0.9, 0.9, 0.8, 0.9), strict=True)]
    found = row(model, model, torch.optim.Adam(groups, lr=0.1))
    assert np.isnan(found["to_edge"])
    assert found["value"] > 0


def test_relative_rates_of_groups_and_of_a_parameter_in_none() -> None:
    one, two, none = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = {one: {"lr": torch.tensor(0.5)}, two: {"lr": 0.125}}
    assert relative_rates([one, two, none], groups) == (0.5, [1.0, 0.25, 0.0])
    assert relative_rates([none], {}) == (0.0, [0.0])
    with pytest.raises(ValueError, match="keeps no second moment"):
        adam_preconditioner({}, [one], groups)


class Crossing(nn.Module):
    """Two directions, of which the second becomes the sharper one after the first row."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.float64))
        self.second = 1.0

    def forward(self) -> Tensor:
        return 0.5 * (10.0 * self.x[0] ** 2 + self.second * (self.x[1] - 1e-3) ** 2)


def test_a_search_from_the_last_eigenvector_sees_that_another_eigenvalue_became_the_largest() -> None:
    from probe_toys import ListSink

    from stabilitylab.probes import Watcher

    model, sink = Crossing(), ListSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    options: dict[str, Any] = {"curvature_every": 1, "curvature_loss": model, "strict": True}
    with Watcher(model, sink, probes="sharpness", optimizer=optimizer, **options) as watcher:
        for step in range(3):
            model.second = 1.0 if step == 0 else 25.0
            loss = model()
            loss.backward()
            watcher.step(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    assert [numbers(sink, step, "sharpness")["value"] for step in range(3)] == pytest.approx([10, 25, 25], rel=0.01)
