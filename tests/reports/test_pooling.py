"""Long runs pooled: against brute force, cell by cell."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stabilitylab.reports.base import ABSENT, NONFINITE, ZERO
from stabilitylab.reports.pooling import findings, group_starts, pool, thin


def random_map(seed: int, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    values = draw.lognormal(0, 20, (rows, count)) * draw.choice([1, -1], (rows, count), p=[0.9, 0.1])
    kinds = draw.choice([0, ZERO, ABSENT, NONFINITE], (rows, count), p=[0.3, 0.4, 0.29, 0.01])
    values[kinds == ZERO] = 0
    values[kinds == ABSENT] = np.nan
    values[kinds == NONFINITE] = draw.choice([np.nan, np.inf, -np.inf], (kinds == NONFINITE).sum())
    return values, kinds


def test_findings_are_told_apart() -> None:
    values = np.array([1e-300, 0.0, -0.0, np.nan, np.inf, -np.inf, np.nan, 0.0])
    absent = np.array([False] * 6 + [True] * 2)
    assert findings(values, absent).tolist() == [0, ZERO, ZERO, NONFINITE, NONFINITE, NONFINITE, ABSENT, ABSENT]


@pytest.mark.parametrize("count", [11, 40, 97, 1000])
def test_pooling_keeps_maxima_and_findings(count: int) -> None:
    values, kinds = random_map(count, 7, count)
    x = np.arange(count) * 3 + 5
    places, z, finding = pool(x, values, kinds, columns=10)
    starts = [int(np.flatnonzero(x == place)[0]) for place in places]
    assert len(starts) == 10
    assert starts[0] == 0
    sizes = np.diff([*starts, count])
    assert sizes.max() - sizes.min() <= 1
    for column, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for row in range(len(values)):
            cell, own = kinds[row, start : start + size], values[row, start : start + size]
            if NONFINITE in cell:
                assert finding[row, column] == NONFINITE
                assert np.isnan(z[row, column])
            elif 0 in cell:
                assert finding[row, column] == 0
                assert z[row, column] == max(own[cell == 0])
            else:
                assert finding[row, column] == (ZERO if ZERO in cell else ABSENT)
                assert ZERO not in cell or z[row, column] == 0


def test_a_cell_that_does_not_exist_is_no_finding() -> None:
    values = np.array([[np.nan, 2.0, np.nan, np.nan, np.nan, 0.0]])
    absent, missing = np.zeros((1, 6), bool), np.array([[True, False, True, True, True, False]])
    marks = findings(values, absent, missing)
    assert marks.tolist() == [[0, 0, 0, 0, 0, ZERO]]
    _, z, finding = pool(np.arange(6), values, marks, columns=3)
    assert finding.tolist() == [[0, 0, ZERO]]
    np.testing.assert_array_equal(z, [[2.0, np.nan, 0.0]])


def test_a_short_map_stays_as_it_is() -> None:
    values, kinds = random_map(0, 3, 10)
    x, z, finding = pool(np.arange(10), values, kinds, columns=10)
    assert x.tolist() == list(range(10))
    assert z is values
    assert finding is kinds


def test_one_spike_in_a_hundred_thousand_steps_survives() -> None:
    values = np.ones((2, 100_000))
    values[1, 31_234] = 1e6
    x, z, finding = pool(np.arange(100_000), values, np.zeros(values.shape, np.int8), columns=600)
    column = int(np.searchsorted(x, 31_234, side="right")) - 1
    assert z.shape == (2, 600)
    assert not finding.any()
    assert np.argwhere(z > 1).tolist() == [[1, column]]


def test_groups_are_never_empty() -> None:
    assert group_starts(3, 10).tolist() == [0, 1, 2]
    assert group_starts(0, 10).tolist() == []


@pytest.mark.parametrize("count", [60, 101, 5000])
def test_a_thinned_line_keeps_ends_and_extremes_of_each_group(count: int) -> None:
    draw = np.random.default_rng(count)
    y = draw.standard_normal(count)
    y[draw.random(count) < 0.1] = np.nan
    y[count // 2 : count // 2 + count // 5] = np.inf  # whole groups without a number
    x = np.arange(count) * 2
    kept, shown = thin(x, y, columns=10)
    assert len(kept) <= 5 * 10 < count  # ends, extremes and one gap of each group
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, x[-1])
    usual = np.where(np.isfinite(y), y, np.nan)
    np.testing.assert_array_equal(shown, usual[kept // 2])
    starts = [*group_starts(count, 10), count]
    for start, end in itertools.pairwise(starts):
        own, there = usual[start:end], shown[(kept >= 2 * start) & (kept < 2 * end)]
        assert np.isnan(there).any() == np.isnan(own).any()
        if np.isfinite(own).any():
            assert (np.nanmin(there), np.nanmax(there)) == (np.nanmin(own), np.nanmax(own))


def test_a_short_line_keeps_all_points() -> None:
    x, y = thin(np.arange(4), np.array([1.0, np.inf, np.nan, 2.0]), columns=1)
    assert x.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(y, [1, np.nan, np.nan, 2])
    assert thin(np.empty(0, int), np.empty(0))[0].size == 0
