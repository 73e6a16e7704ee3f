"""Curvature against dense Hessians in float64, and critical rates against closed forms and dense line searches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rest_slow import rest_slow
from torch import Tensor, nn

from stabilitylab.probes.curvature import (
    HessianProducts,
    adam_preconditioner,
    critical_rate,
    largest_eigenvalue,
)
from stabilitylab.probes.curvature.hessian_products import moved

Made = tuple[nn.Module, Callable[[], Tensor]]


class Attends(nn.Module):
    """A causal attention by the fused operator, in front of a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def perceptron() -> Made:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)
    return model, lambda: F.mse_loss(model(x), y)


def attention() -> Made:
    model, x = Attends().double(), torch.randn(2, 5, 4, dtype=torch.float64)
    labels = torch.randint(0, 3, (2, 5))
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1), labels.flatten())


def convolution() -> Made:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(18, 2)).double()
    x, labels = torch.randn(4, 1, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    return model, lambda: F.cross_entropy(model(x), labels)


def normed() -> Made:
    model = nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6)).double()
    ids = torch.tensor([0, 3, 5, 1, 1])
    return model, lambda: F.cross_entropy(model(ids), ids.flip(0))


def linear() -> Made:
    """Its Hessian in the bias is a constant, in the weights that of least squares."""
    model = nn.Linear(4, 1).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    return model, lambda: 0.5 * (model(x) - y).square().mean()


MADE = {each.__name__: each for each in (perceptron, attention, convolution, normed, linear)}


def made(name: str) -> Made:
    torch.manual_seed(3)
    return MADE[name]()


def dense(model: nn.Module, loss: Callable[[], Tensor]) -> np.ndarray:
    """The whole Hessian, a row a backward."""
    parameters = list(model.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), parameters, create_graph=True)])
        rows = [
            torch.cat([
                r.flatten() for r in torch.autograd.grad(
                    g, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            ])
            for g in gradient
        ]  # fmt: skip
    return torch.stack(rows).detach().numpy()


def flat(vector: list[Tensor]) -> np.ndarray:
    return torch.cat([v.flatten() for v in vector]).detach().double().numpy()


@pytest.mark.parametrize("how", ["exact", "differences"])
@pytest.mark.parametrize("name", MADE)
def test_products_are_those_of_the_dense_hessian(name: str, how: str) -> None:
    model, loss = made(name)
    hessian, before = dense(model, loss), [p.detach().clone() for p in model.parameters()]
    direction = [torch.randn_like(p) for p in model.parameters()]
    with HessianProducts(loss, list(model.parameters()), how) as product:  # type: ignore[arg-type]
        found = [flat(product(direction)), flat(product([2 * v for v in direction]))]
        assert product.count == 2
    exact = hessian @ flat(direction)
    tolerance = {"exact": 1e-10, "differences": 1e-7}[how] * np.abs(hessian).max()
    np.testing.assert_allclose(found[0], exact, rtol=0, atol=tolerance * np.abs(flat(direction)).sum())
    np.testing.assert_allclose(found[1], 2 * exact, rtol=0, atol=2 * tolerance * np.abs(flat(direction)).sum())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", MADE)
def test_the_largest_eigenvalue_is_that_of_the_dense_hessian(name: str) -> None:
    model, loss = made(name)
    exact = np.linalg.eigvalsh(dense(model, loss))[-1]
    parameters = list(model.parameters())
    with HessianProducts(loss, parameters) as product:
        cold = largest_eigenvalue(product, [torch.randn_like(p) for p in parameters], products=60, tolerance=1e-9)
        assert cold.value == pytest.approx(exact, rel=1e-6)
        warm = largest_eigenvalue(product, cold.vector, products=5)
    assert warm.converged
    assert warm.products == 1
    assert warm.value == pytest.approx(exact, rel=1e-6)
    assert np.linalg.norm(flat(cold.vector)) == pytest.approx(1)


def test_the_residual_bounds_the_error_and_few_products_say_that_they_do_not_suffice() -> None:
    rng = np.random.default_rng(0)
    for n in (6, 30, 200):
        matrix = rng.normal(size=(n, n))
        matrix = torch.from_numpy(matrix + matrix.T)
        values = np.linalg.eigvalsh(matrix.numpy())
        start = [torch.from_numpy(rng.normal(size=n))]
        for products in (1, 3, 5, n):
            found = largest_eigenvalue(lambda v, m=matrix: [m @ v[0]], start, products=products, tolerance=1e-8)
            assert np.abs(values - found.value).min() <= found.residual * (1 + 1e-9) + 1e-9
            assert found.products <= products
            assert found.converged is (found.residual <= 1e-8 * abs(found.value))
        assert found.value == pytest.approx(values[-1], rel=1e-7)


def test_a_negative_operator_has_its_least_negative_eigenvalue() -> None:
    matrix = torch.diag(torch.tensor([-3.0, -2.0, -0.5], dtype=torch.float64))
    found = largest_eigenvalue(lambda v: [matrix @ v[0]], [torch.ones(3, dtype=torch.float64)])
    assert found.value == pytest.approx(-0.5)


def test_what_has_no_eigenvalue_says_so() -> None:
    zero = [torch.zeros(3, dtype=torch.float64)]
    with pytest.raises(ValueError, match="give a random direction"):
        largest_eigenvalue(lambda v: v, zero)
    nothing = largest_eigenvalue(lambda v: [v[0] * math.nan], [torch.ones(3, dtype=torch.float64)])
    assert math.isnan(nothing.value)
    assert not nothing.converged


@pytest.mark.parametrize("name", ["perceptron", "attention"])
@pytest.mark.parametrize("steps", [1, 12])
def test_preconditioned_sharpness_is_that_of_the_dense_matrix(name: str, steps: int) -> None:
    model, loss = made(name)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-2, betas=(0.8, 0.95), eps=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    second = np.concatenate([optimizer.state[p]["exp_avg_sq"].flatten().numpy() for p in parameters])
    P = (1 - 0.8**steps) * (np.sqrt(second / (1 - 0.95**steps)) + 1e-4)
    exact = np.linalg.eigvalsh(dense(model, loss) / np.sqrt(P)[:, None] / np.sqrt(P)[None, :])[-1]
    scale = adam_preconditioner(optimizer, parameters)
    with HessianProducts(loss, parameters) as product:

        def preconditioned(v: list[Tensor]) -> list[Tensor]:
            found = product([s * each for s, each in zip(scale, v, strict=True)])
            return [s * each for s, each in zip(scale, found, strict=True)]

        start = [torch.randn_like(p) for p in parameters]
        found = largest_eigenvalue(preconditioned, start, products=60, tolerance=1e-9)
    assert found.value == pytest.approx(exact, rel=1e-6)


def test_an_optimizer_without_second_moments_and_a_frozen_parameter_are_refused() -> None:
    model, loss = made("linear")
    loss().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(ValueError, match="SGD keeps no second moment"):
        adam_preconditioner(optimizer, list(model.parameters()))
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="has no curvature"):
        HessianProducts(loss, list(model.parameters()))


# The critical rate --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(edge=st.floats(1e-6, 1e6), off=st.floats(0.82, 1.24))
def test_four_passes_suffice_where_the_guess_is_within_a_quarter(edge: float, off: float) -> None:
    found = critical_rate(lambda rate: rate - edge, 0.0, edge * off, passes=4)
    assert (found.state, found.passes) == ("found", min(found.passes, 4))
    assert found.low <= edge <= found.high
    assert found.high / found.low <= 1.07
    assert found.rate == pytest.approx(edge, rel=0.035)


@settings(max_examples=200, deadline=None)
@given(edge=st.floats(1e-9, 1e9), guess=st.floats(1e-6, 1e6))
def test_a_far_guess_finds_it_too(edge: float, guess: float) -> None:
    found = critical_rate(lambda rate: rate - edge, 0.0, guess, passes=40)
    assert found.low <= edge <= found.high
    assert found.rate == pytest.approx(edge, rel=0.035)


def test_of_a_quadratic_and_its_gradient_it_is_two_over_the_curvature_along_it() -> None:
    """L(theta - r g) = L - r g'g + r^2 g'Hg / 2, which is L again at r = 2 g'g / g'Hg."""
    model, loss = made("linear")
    parameters = list(model.parameters())
    with HessianProducts(loss, parameters) as product:
        gradient = product.gradient
        along = sum(float((g * h).sum()) for g, h in zip(gradient, product(gradient), strict=True))
    square = sum(float(g.square().sum()) for g in gradient)

    def at(rate: float) -> float:
        with moved(parameters, gradient, -rate), torch.no_grad():
            return float(loss())

    found = critical_rate(at, float(loss().detach()), 0.1, tolerance=1.0001, passes=60)
    assert found.rate == pytest.approx(2 * square / along, rel=1e-4)
    assert found.sharpness == pytest.approx(along / square, rel=1e-4)


@pytest.mark.parametrize("name", rest_slow(MADE, {"attention", "linear"}))
def test_along_adams_update_it_is_that_of_a_dense_line_search(name: str) -> None:
    model, loss = made(name)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    loss().backward()
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    update = [(p.detach() - old) / 1e-2 for p, old in zip(parameters, before, strict=True)]
    for p, old in zip(parameters, before, strict=True):
        p.data.copy_(old)

    def at(rate: float) -> float:
        with moved(parameters, update, rate), torch.no_grad():
            return float(loss())

    base = float(loss().detach())
    grid = np.geomspace(1e-3, 1e2, 4000)
    first = grid[next(i for i, rate in enumerate(grid) if at(float(rate)) > base)]
    found = critical_rate(at, base, 1e-2)
    assert found.rate == pytest.approx(first, rel=0.04)
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_a_loss_that_never_rises_or_always_does_or_is_not_finite() -> None:
    never = critical_rate(lambda rate: -rate, 0.0, 1.0, passes=5)
    assert (never.state, never.low, never.high, never.passes) == ("beyond", never.rate, math.inf, 5)
    assert never.rate == pytest.approx(1.25 ** (1 + 2 + 4 + 8))  # each step as far again in logs
    always = critical_rate(lambda rate: 1.0, 0.0, 1.0, passes=5)
    assert (always.state, always.low, always.rate) == ("below", 0.0, always.high)
    assert always.rate == pytest.approx(1.25 ** -(1 + 2 + 4 + 8))
    breaks = critical_rate(lambda rate: math.nan if rate > 3 else -1.0, 0.0, 1.0)
    assert breaks.rate == pytest.approx(3, rel=0.035)
    with pytest.raises(ValueError, match="give a positive number"):
        critical_rate(lambda rate: rate, 0.0, 0.0)
