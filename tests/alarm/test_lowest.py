"""The lowest mean of a place so far, beside its own definition row by row."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stabilitylab.alarm import Signals
from stabilitylab.alarm.lowest import Lowest
from stabilitylab.alarm.past import LEAST


def by_definition(series: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rise and stall of one place: means, their minimum and its row, from the whole series."""
    means = [series[0]]
    for number, value in enumerate(series[1:], 2):
        weight = max(0.2, 1 / number)
        means.append((1 - weight) * means[-1] + weight * value)
    rise, stall = np.full((2, len(series)), np.nan)
    for row in range(LEAST, len(series)):
        past = np.array(means[LEAST : row + 1])
        rise[row] = means[row] - past.min()
        stall[row] = (row - (LEAST + int(past.argmin()))) / (row + 1)
    return rise, stall


def test_rise_and_stall_are_those_of_the_definition() -> None:
    random = np.random.default_rng(0)
    series = np.column_stack([np.linspace(3, 1, 90), np.r_[np.linspace(3, 1, 45), np.linspace(1, 4, 45)]])
    series += random.normal(0, 0.05, series.shape)
    lowest = Lowest(2)
    told = np.array([lowest.compare(row) for row in series])  # (rows, 2, places)
    for place in range(2):
        rise, stall = by_definition(series[:, place])
        np.testing.assert_allclose(told[:, 0, place], rise, atol=1e-12)
        np.testing.assert_allclose(told[:, 1, place], stall, atol=1e-12)
    assert told[-1, 0, 1] > 2.5  # it rose from 1 to 4
    assert told[-1, 1, 1] == pytest.approx(0.5, abs=0.06)  # half of its rows ago


def test_a_number_that_is_not_finite_is_left_out_and_a_state_goes_on() -> None:
    series = np.random.default_rng(1).normal(0, 1, 60)
    whole, first = Lowest(1), Lowest(1)
    expected = [whole.compare(np.array([value])) for value in series]
    for value in series[:15]:  # a state in which nothing is the lowest yet
        first.compare(np.array([value]))
    second = Lowest.from_state(json.loads(json.dumps(first.state_dict())))
    assert np.isnan(second.compare(np.array([np.inf]))).all()
    assert np.isnan(second.compare(np.array([np.nan]))).all()
    for value, (rise, stall) in zip(series[15:], expected[15:], strict=True):
        own = second.compare(np.array([value]))
        np.testing.assert_array_equal(own[0], rise)
        np.testing.assert_array_equal(own[1], stall)


def test_the_alarm_reads_the_loss_over_its_lowest_level() -> None:
    """In logarithms, so that a loss in other units has the same readings; and over a resume."""
    losses = np.r_[np.geomspace(8, 2, 60), np.geomspace(2, 6, 30)]

    def readings(scale: float) -> list[tuple[float, float]]:
        signals, found = Signals(), []
        for loss in losses:
            signals.load_state_dict(json.loads(json.dumps(signals.state_dict())))
            told = signals.read({"loss": scale * float(loss)}, {})
            if "loss.rise" in told:
                found.append((told["loss.rise"].value, told["loss.stall"].value))
        return found

    own = np.array(readings(1.0))
    rise, stall = by_definition(np.log(losses))
    np.testing.assert_allclose(own, np.column_stack([rise, stall])[LEAST:], atol=1e-12)
    np.testing.assert_allclose(own, readings(100.0), atol=1e-9)
    assert own[:39].max() < 1e-12  # a loss that falls has neither
    assert own[-1, 0] > 0.8
