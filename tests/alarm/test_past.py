"""A place against its past: against a loop written out, and in cases with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stabilitylab.alarm.past import FAST, FLOOR, LEAST, OUTLIER, SLOW, Past


def by_hand(values: list[float]) -> list[tuple[float, float]]:
    """The docstring's formula for one place, one number after the other."""
    mean = square = fast = 0.0
    rows, found = 0, []
    for x in values:
        if not math.isfinite(x):
            found.append((math.nan, math.nan))
            continue
        noise = max(math.sqrt(square), FLOOR)
        away, known = x - mean, rows >= LEAST
        z = away / noise if known else math.nan
        if known:
            away = min(max(away, -OUTLIER * noise), OUTLIER * noise)
        rows += 1
        slow, quick = max(SLOW, 1 / rows), max(FAST, 1 / rows)
        mean += slow * away
        square = (1 - slow) * (square + slow * away * away)
        fast += quick * (x - fast)
        found.append((z, fast - mean if known else math.nan))
    return found


def test_two_places_are_two_loops() -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal((120, 2)).cumsum(axis=0) * 0.1
    values[50, 0] = math.inf
    values[60:70, 1] = math.nan
    values[90, 0] += 30.0
    past = Past(2)
    found = np.array([np.stack(past.compare(row), axis=1) for row in values])  # (rows, places, 2)
    for place in range(2):
        np.testing.assert_allclose(found[:, place], by_hand(values[:, place].tolist()), rtol=1e-9)


def test_the_first_rows_are_their_mean_and_variance() -> None:
    values = np.random.default_rng(2).standard_normal(LEAST)
    past = Past(1)
    for value in values:
        past.compare(np.array([value]))
    assert past.mean[0] == pytest.approx(values.mean())
    assert past.square[0] == pytest.approx(values.var())


def test_nothing_is_said_before_twenty_rows() -> None:
    past = Past(1)
    told = [past.compare(np.array([1.0 + 0.1 * (row % 2)]))[0][0] for row in range(LEAST + 1)]
    assert np.isnan(told[:LEAST]).all()
    assert np.isfinite(told[LEAST])


def test_one_spike_is_not_the_measure_of_the_next() -> None:
    past = Past(1)
    random = np.random.default_rng(3)
    for _ in range(100):
        past.compare(0.1 * random.standard_normal(1))
    first, _ = past.compare(np.array([50.0]))
    second, _ = past.compare(np.array([50.0]))
    assert first[0] > 300
    assert second[0] > first[0] / 2


def test_a_constant_number_is_believed_to_two_percent() -> None:
    past = Past(1)
    for _ in range(50):
        past.compare(np.array([0.0]))
    z, drift = past.compare(np.array([0.1]))
    assert z[0] == pytest.approx(0.1 / FLOOR)
    assert drift[0] == pytest.approx(FAST * 0.1 - SLOW * OUTLIER * FLOOR)


def test_state_goes_on_where_it_was() -> None:
    random = np.random.default_rng(4)
    values = random.standard_normal((60, 3))
    whole, half = Past(3), Past(3)
    for row in values[:30]:
        whole.compare(row)
        half.compare(row)
    half = Past.from_state(half.state_dict())
    for row in values[30:]:
        np.testing.assert_array_equal(whole.compare(row), half.compare(row))
