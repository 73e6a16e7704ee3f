"""Which rows are probed."""

from __future__ import annotations

import itertools

import pytest

from stabilitylab.errors import UsageError
from stabilitylab.probes import is_due
from stabilitylab.probes._engine.cadence import REFERENCE_FINENESS, checked


def test_log_rows_are_dense_first_and_ten_percent_apart_later() -> None:
    rows = [row for row in range(5000) if is_due(row, "log")]
    assert rows[:16] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19]
    gaps = [(b - a) / a for a, b in itertools.pairwise(rows) if a > 100]
    assert all(0.1 <= gap < 0.11 for gap in gaps)


def test_the_reference_pass_is_half_as_dense() -> None:
    rows = [row for row in range(5000) if is_due(row, "log", REFERENCE_FINENESS)]
    assert rows[:12] == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18]
    assert all(0.2 <= (b - a) / a < 0.21 for a, b in itertools.pairwise(rows) if a > 100)


def test_every_n_rows() -> None:
    assert [row for row in range(10) if is_due(row, 3)] == [0, 3, 6, 9]


@pytest.mark.parametrize("every", [0, -1, "often", 2.5, True])
def test_a_cadence_that_means_nothing_is_refused(every: object) -> None:
    with pytest.raises(UsageError, match=r"update_every = .* must be a number of steps"):
        checked(every, "update_every")  # type: ignore[arg-type]
