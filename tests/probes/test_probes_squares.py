"""Sums of squares whose pattern of absent tensors changes from row to row, as that of experts does."""

from __future__ import annotations

import pytest
import torch

from stabilitylab.probes.parameters.squares import PATTERNS, Squares


@pytest.mark.parametrize("size", [8, 2000])
def test_ever_new_patterns_are_right_and_not_all_remembered(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    like = [torch.randn(size, generator=draw) for _ in range(12)]
    squares = Squares([(n, slice(None)) for n in range(12)], like, torch.device("cpu"))
    for _ in range(2 * PATTERNS):
        there = torch.rand(12, generator=draw) < 0.5
        found = squares([tensor if kept else None for tensor, kept in zip(like, there.tolist(), strict=True)])
        expected = [
            float(tensor.double().square().sum()) * kept for tensor, kept in zip(like, there.tolist(), strict=True)
        ]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert len(squares._plans) == PATTERNS
