"""Which rows of curvature may decide anything, of runs of today and of older ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from stabilitylab.decisive import BOUND, CONVERGED, FOUND, NOISE, decisive

NAN = float("nan")


def chosen(table: str, column: str, columns: Mapping[str, Sequence[float]]) -> list[bool] | None:
    found = decisive(table, column, lambda name: np.array(columns[name]) if name in columns else None)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("table", ["preconditioned_sharpness", "sharpness"])
def test_an_eigenvalue_counts_by_its_residual(table: str) -> None:
    residuals = [0.0, CONVERGED, 1.01 * CONVERGED, NAN]
    assert chosen(table, "value", {"residual": residuals, "converged": [0, 0, 1, 1]}) == [True, True, False, False]
    assert chosen(table, "value", {"converged": [1, 0, NAN]}) == [True, False, False]
    assert chosen(table, "along_gradient", {"residual": residuals}) is None  # which needs no search
    assert chosen(table, "value", {}) is None


def test_a_critical_rate_counts_where_it_was_found() -> None:
    states = [FOUND, BOUND, NOISE, NAN]
    for column in ("value", "headroom", "critical_rate", "least", "most"):
        assert chosen("critical_sharpness", column, {"state": states}) == [True, False, False, False]
    older = {"low": [1.0, NAN, 1.0, 0.0], "high": [2.0, 2.0, NAN, 1.0]}
    assert chosen("critical_sharpness", "headroom", older) == [True, False, False, False]
    assert chosen("critical_sharpness", "forwards", {"state": states}) is None
    assert chosen("grad_norm", "value", {"residual": [9.0]}) is None
