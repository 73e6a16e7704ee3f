"""The rules that turn raw numbers into columns, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitylab.probes import Max, Mean, Norm, Quantile, Rule

MASK = torch.tensor([[True, True, False], [True, False, False]])


def applied(rule: Rule, values: torch.Tensor, weight: torch.Tensor | None, calls: int = 1) -> float:
    """One row's column after ``calls`` calls with the same numbers, row 1 of 3."""
    parts = torch.full((3, rule.width), 0.0 if rule.additive else -torch.inf, dtype=torch.float64)
    for _ in range(calls):
        rule.add(parts, torch.tensor([1]), values[None], weight)
    finished = rule.finish(parts)
    assert finished.shape == (3,)
    assert finished.dtype == torch.float64
    return finished[1].item()


def test_mean_counts_real_tokens_of_all_calls_and_never_sees_padding() -> None:
    values = torch.tensor([[1.0, 2.0, torch.nan], [6.0, torch.inf, torch.nan]])
    assert applied(Mean(), values, MASK) == 3.0
    assert applied(Mean(), values, MASK, calls=2) == 3.0


def test_mean_of_nothing_is_nan_and_of_scalars_counts_calls() -> None:
    assert np.isnan(applied(Mean(), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)))
    assert applied(Mean(), torch.tensor(4.0), None, calls=3) == 4.0


def test_norm_adds_squares() -> None:
    values = torch.tensor([[1.0, 2.0, torch.nan], [2.0, torch.nan, torch.nan]])
    assert applied(Norm(), values, MASK) == 3.0
    assert applied(Norm(), torch.tensor(3.0), None, calls=4) == 6.0


@pytest.mark.parametrize("value", [1.2e-38, 1e-30, 1e38])
def test_norm_keeps_what_a_float32_square_would_lose(value: float) -> None:
    assert applied(Norm(), torch.tensor(value, dtype=torch.float32), None, 2) == pytest.approx(2**0.5 * value, rel=1e-6)


def test_max_is_over_real_tokens_of_all_calls_and_keeps_nan() -> None:
    values = torch.tensor([[1.0, -2.0, 9.0], [0.5, 7.0, 9.0]])
    assert applied(Max(), values, MASK) == 1.0
    assert applied(Max(), torch.tensor(-3.0), None, calls=2) == -3.0
    assert np.isnan(applied(Max(), torch.full((2, 3), torch.nan), MASK))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(2.0**-19, 2.0**43, width=32), min_size=1, max_size=300),
    st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_quantile_is_within_its_stated_error(numbers: list[float], q: float) -> None:
    values = torch.tensor([numbers], dtype=torch.float32)
    found = applied(Quantile(q=q), values, torch.ones_like(values, dtype=torch.bool))
    assert found == pytest.approx(np.quantile(values.numpy(), q, method="inverted_cdf"), rel=0.0222)


def test_quantile_of_large_numbers_is_finite_and_within_an_octave() -> None:
    ones = torch.ones(1, 4, dtype=torch.bool)
    for number in (2.0**44, 3e13, 8.4e20, 1e38):
        found = float(applied(Quantile(), torch.full((1, 4), number), ones))
        assert number / 2**0.5 <= found <= number * 2**0.5 * (1 + 1e-6)
    assert applied(Quantile(), torch.tensor([[1.0, 1.0, 2.0**43.99, torch.inf]]), ones) == torch.inf


def test_quantile_of_zero_inf_nan_and_nothing() -> None:
    ones = torch.ones(1, 4, dtype=torch.bool)
    assert applied(Quantile(q=0.5), torch.zeros(1, 4), ones) == 0.0
    assert applied(Quantile(q=0.99), torch.tensor([[1.0, 2.0, 3.0, torch.inf]]), ones) == torch.inf
    assert applied(Quantile(q=0.5), torch.tensor([[1.0, 1.0, 1.0, torch.inf]]), ones) == pytest.approx(1, rel=0.0222)
    assert np.isnan(applied(Quantile(q=0.5), torch.tensor([[1.0, 1.0, 1.0, torch.nan]]), ones))
    assert np.isnan(applied(Quantile(), torch.ones(1, 4), ~ones))


def test_quantile_leaves_padding_out_and_adds_calls() -> None:
    values = torch.tensor([[1.0, 2.0, 1e9], [4.0, 1e9, 1e9]])
    assert applied(Quantile(q=1.0), values, MASK, calls=2) == pytest.approx(4.0, rel=0.0222)


def test_rows_are_apart() -> None:
    for rule in (Mean(), Norm(), Max(), Quantile(q=0.5)):
        parts = torch.full((3, rule.width), 0.0 if rule.additive else -torch.inf, dtype=torch.float64)
        rule.add(parts, torch.tensor([2, 0]), torch.tensor([[8.0], [2.0]]), torch.ones(1, dtype=torch.bool))
        assert rule.finish(parts)[[0, 2]].tolist() == pytest.approx([2.0, 8.0], rel=0.0222)


def test_a_quantile_needs_no_sum_of_floating_point_numbers_that_cuda_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch.use_deterministic_algorithms(True) CUDA has none; its tests may run without a GPU."""
    own = torch.Tensor.cumsum

    def cumsum(numbers: torch.Tensor, dim: int) -> torch.Tensor:
        assert not numbers.is_floating_point(), "cumsum does not have a deterministic implementation"
        return own(numbers, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    values = torch.arange(1.0, 101.0).view(1, 100)
    assert applied(Quantile(q=0.99), values, torch.ones(1, 100, dtype=torch.bool)) == pytest.approx(99, rel=0.0222)


@pytest.mark.parametrize("rule", [Mean(), Max(), Quantile(q=0.5)], ids=lambda rule: type(rule).__name__)
def test_a_call_without_tokens_adds_nothing(rule: Rule) -> None:
    parts = torch.full((1, rule.width), 0.0 if rule.additive else -torch.inf, dtype=torch.float64)
    row = torch.tensor([0])
    rule.add(parts, row, torch.zeros(1, 0), torch.zeros(0, dtype=torch.bool))  # an expert that got no token
    assert np.isnan(rule.finish(parts).item())
    rule.add(parts, row, torch.tensor([[2.0]]), torch.ones(1, dtype=torch.bool))
    rule.add(parts, row, torch.zeros(1, 0), torch.zeros(0, dtype=torch.bool))
    assert rule.finish(parts).item() == pytest.approx(2.0, rel=0.03)
