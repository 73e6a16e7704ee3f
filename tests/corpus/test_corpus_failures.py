"""When a run of the corpus fails (t*): losses with known answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def noisy(rows: int = 400, seed: int = 0) -> np.ndarray:
    return 4.0 + 0.1 * np.random.default_rng(seed).standard_normal(rows)


def failure_of(scripts: Any, loss: np.ndarray, **options: Any) -> Any:
    gradient = options.pop("gradient", np.ones_like(loss))
    return scripts("failure").failure(loss, gradient, options.pop("held_out", []), options.pop("twin", None))


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_or_falling_loss_is_no_failure(scripts: Any, seed: int) -> None:
    assert failure_of(scripts, noisy(seed=seed)).step is None
    assert failure_of(scripts, noisy(seed=seed) + np.linspace(4, 0, 400)).step is None


def test_a_rise_that_stays_is_a_failure_at_its_first_row(scripts: Any) -> None:
    loss = noisy()
    loss[200:] += 2.0
    assert failure_of(scripts, loss)[:2] == (200, "rise")


def test_a_rise_that_heals_is_benign(scripts: Any) -> None:
    loss = noisy()
    loss[200:230] += 2.0
    found = failure_of(scripts, loss)
    assert (found.step, found.benign, found.open) == (None, (200,), None)


def test_a_rise_at_the_end_is_undecided(scripts: Any) -> None:
    loss = noisy()
    loss[380:] += 2.0
    found = failure_of(scripts, loss)
    assert (found.step, found.open) == (None, 380)


def test_a_slow_rise_is_one_over_the_lowest_level(scripts: Any) -> None:
    loss = noisy() + np.maximum(np.arange(400) - 200, 0) * 0.01
    step = failure_of(scripts, loss).step
    assert 240 < step < 300  # .7 above the level, 70 rows at .01 each


def test_what_is_not_finite_is_a_failure(scripts: Any) -> None:
    loss = noisy()
    loss[300] = math.nan
    assert failure_of(scripts, loss)[:2] == (300, "not finite")
    gradient = np.ones(400)
    gradient[150] = math.inf
    assert failure_of(scripts, noisy(), gradient=gradient)[:2] == (150, "not finite")


def test_a_rise_that_ends_in_nan_began_with_the_rise(scripts: Any) -> None:
    loss = noisy()
    loss[290:300] += 3.0
    loss[300:] = math.nan
    assert failure_of(scripts, loss)[:2] == (290, "rise")


def test_behind_the_twin_for_good(scripts: Any) -> None:
    twin = [(step, 4.0) for step in range(0, 400, 5)]
    worse = [(step, 4.3 if step >= 250 else 4.2) for step, _ in twin]
    assert failure_of(scripts, noisy(), held_out=worse, twin=twin)[:2] == (250, "behind its twin")
    back = [*worse[:-1], (395, 4.0)]
    found = failure_of(scripts, noisy(), held_out=back, twin=twin)
    assert (found.step, found.open) == (None, None)
    late = [(step, 4.3 if step >= 390 else 4.0) for step, _ in twin]
    found = failure_of(scripts, noisy(), held_out=late, twin=twin)
    assert (found.step, found.open) == (None, 390)  # two evaluations decide nothing
