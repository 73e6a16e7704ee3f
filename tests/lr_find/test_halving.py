"""The rules of ``lr-find`` on made-up losses: which trials it runs, and what it answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_losses import START, MadeTrials, bowl
from scipy import stats

from stabilitylab.errors import UsageError
from stabilitylab.lr_find.answer import answer, safe_trend
from stabilitylab.lr_find.halving import RatePlan, halve
from stabilitylab.lr_find.pairs import excess
from stabilitylab.lr_find.search import RateResult, RateTrial

PLAN = RatePlan(1e-3, 1500, warmup=150)


@pytest.mark.parametrize(
    ("horizon", "rungs"),
    [
        (100, (100,)),
        (200, (150, 200)[1:]),
        (300, (150, 300)),
        (1500, (150, 600, 1500)),
        (10_000, (150, 450, 1350, 4000, 10_000)),
        (100_000, (150, 450, 1350, 4050, 12_150, 40_000, 100_000)),
    ],
)
def test_rungs_grow_threefold_up_to_forty_percent_of_the_horizon(horizon: int, rungs: tuple[int, ...]) -> None:
    assert RatePlan(1e-3, horizon).rungs == rungs


def test_the_best_and_the_largest_safe_rate_of_a_bowl_are_found() -> None:
    made = MadeTrials(bowl(2e-3), fails_at=0.03)
    record = halve(PLAN, made)
    found = answer(record)
    assert found.outcome == "found"
    assert found.whole
    assert found.best is not None
    assert found.best.value == 2e-3
    assert found.best.low == pytest.approx(2e-3 / math.sqrt(2))
    assert found.best.high == pytest.approx(2e-3 * math.sqrt(2))
    assert found.safe is not None
    assert (found.safe.value, found.safe.low, found.safe.high) == (
        2e-3,
        2e-3,
        4e-3,
    )  # the next one loses .1, delta is .05
    assert found.delta == 0.05
    assert made.rates(1500, seed=1) == [2e-3]
    assert made.rates(1500, seed=2) == [2e-3]


def test_the_grid_reaches_from_an_eighth_of_the_best_to_the_first_failure() -> None:
    made = MadeTrials(bowl(2e-3, depth=0.03), fails_at=0.03)
    halve(PLAN, made)
    assert made.rates(150) == [1e-3 * 2.0**power for power in range(-2, 6)]


def test_the_grid_ends_at_a_rate_of_no_use() -> None:
    made = MadeTrials(bowl(1e-3, depth=0.2))
    halve(PLAN, made)
    lowest = bowl(1e-3, depth=0.2)(RateTrial(1e-3, 0, 150))
    above = [rate for rate in made.rates(150) if rate > 1e-3]
    useless = [rate for rate in above if 0.2 * math.log2(rate / 1e-3) ** 2 > (START - lowest) / 2]
    assert useless == [max(made.rates(150))]


def test_before_forty_percent_of_the_horizon_losses_drop_nothing() -> None:
    made = MadeTrials(bowl(1e-3, depth=0.3), fails_at=0.1)
    halve(replace(PLAN, horizon=10_000), made)
    alive = [rate for rate in made.rates(150) if rate < 0.1]
    for updates in (450, 1350, 4000):
        assert made.rates(updates) == alive
    assert made.rates(10_000) == [5e-4, 1e-3, 2e-3]  # then the neighbours of the best alone are left


def test_at_least_three_rates_that_span_a_factor_of_eight_go_on() -> None:
    made = MadeTrials(bowl(1e-3), fails_at=1.5e-3)
    halve(replace(PLAN, horizon=10_000), made)
    assert made.rates(450) == [1.25e-4, 2.5e-4, 5e-4, 1e-3]


def test_a_best_rate_that_moves_down_with_the_updates_is_followed() -> None:
    def moving(trial: RateTrial) -> float:
        return bowl(4e-3 * (150 / trial.updates) ** 1.5)(trial)

    made = MadeTrials(moving, fails_at=0.03)
    found = answer(halve(PLAN, made))
    assert found.best is not None
    assert found.best.value == 1.25e-4  # 4e-3 / 10^1.5 = 1.26e-4
    assert any("was the lowest or the highest that was left" in note for note in found.notes)


def test_a_seed_that_fails_lowers_the_best_rate() -> None:
    made = MadeTrials(bowl(1.9e-3), fails_at=0.03, fails=lambda trial: trial.seed == 2 and trial.rate >= 2e-3)
    found = answer(halve(PLAN, made))
    assert found.best is not None
    assert found.best.value == 1e-3
    assert any("seed 2" in note for note in found.notes)


def test_the_largest_safe_rate_is_above_the_best_where_the_loss_is_flat() -> None:
    made = MadeTrials(bowl(1e-3, depth=0.01), fails_at=0.03)
    found = answer(halve(PLAN, made))
    assert found.safe is not None
    assert found.safe.value == 4e-3  # .01 * 2^2 = .04 is within .05, .01 * 3^2 is not
    assert found.safe.high == 8e-3
    assert made.rates(1500, seed=1) == [1e-3, 4e-3]


def test_a_safe_rate_whose_other_seed_fails_gives_way_to_the_next_lower_one() -> None:
    made = MadeTrials(bowl(1e-3, depth=0.01), fails_at=0.03, fails=lambda t: t.seed == 1 and t.rate > 3e-3)
    found = answer(halve(PLAN, made))
    assert found.safe is not None
    assert (found.safe.value, found.safe.high) == (2e-3, 4e-3)


def test_an_unread_source_at_the_last_rung_rejects_a_rate_and_not_before() -> None:
    made = MadeTrials(bowl(2e-3), fails_at=0.03, unread=lambda t: t.updates == 1500 and t.rate > 1.5e-3)
    found = answer(halve(PLAN, made))
    assert found.best is not None
    assert found.best.value == 1e-3


@pytest.mark.parametrize(("needed", "least", "below"), [(0, 0, 0), (10, 10, 0), (30, 40, 10), (100, 150, 40)])
def test_the_least_warmup_is_the_first_that_does_not_lower_the_safe_rate(needed: int, least: int, below: int) -> None:
    def loss(trial: RateTrial) -> float:
        short = 0 <= trial.warmup < needed
        return bowl(2e-3)(trial) + (0.2 if short else 0.0)

    found = answer(halve(PLAN, MadeTrials(loss, fails_at=0.03)))
    assert found.warmup is not None
    assert (found.warmup.value, found.warmup.low) == (least, below)


def test_a_plan_without_warmup_asks_for_none() -> None:
    made = MadeTrials(bowl(2e-3), fails_at=0.03)
    assert answer(halve(replace(PLAN, warmup=0), made)).warmup is None
    assert all(trial.warmup == -1 for trial in made.asked)


def test_a_model_that_fails_at_every_rate_is_told() -> None:
    found = answer(halve(PLAN, MadeTrials(bowl(1e-3), fails_at=0.0)), name="mine")
    assert found.outcome == "fails at every rate"
    assert str(found).startswith("mine fails at every rate from 6.1e-08 to 0.004 (6.1e-08: the loss is nan")


def test_a_model_that_fails_at_no_rate_is_told() -> None:
    found = answer(halve(PLAN, MadeTrials(bowl(1e-3, depth=0.0))))
    assert found.outcome == "found"
    assert found.safe is not None
    assert found.safe.high is None
    assert "No rate failed" in str(found)


def test_rates_of_several_groups_are_told() -> None:
    found = answer(halve(PLAN, MadeTrials(bowl(2e-3), fails_at=0.03)), rates=(2e-2, 3e-4, 2e-2))
    assert found.best is not None
    own = f"{found.best.value:.3g}, {found.best.value * 0.015:.3g}"
    assert f"A rate is the largest of all parameter groups; at the best rate the groups have {own}." in str(found)
    assert "parameter groups" not in str(answer(halve(PLAN, MadeTrials(bowl(2e-3))), rates=(2e-2, 2e-2)))


def test_a_constant_loss_is_told() -> None:
    made = MadeTrials(lambda trial: START)
    found = answer(halve(PLAN, made), name="mine")
    assert found.outcome == "constant"
    assert "The loss of mine stays at 6 at every rate" in str(found)
    assert made.spent == 5 * 150


def test_a_budget_ends_the_search_with_what_is_known() -> None:
    made = MadeTrials(bowl(2e-3), fails_at=0.03, updates=2500)
    found = answer(halve(replace(PLAN, horizon=10_000), made))
    assert found.outcome == "found"
    assert found.updates == 450
    assert not found.whole
    assert found.stopped
    assert any("The budget suffices for 3 of 7 rates" in note for note in found.notes)
    assert made.spent <= 2500


def test_a_budget_below_the_first_rung_names_no_rate() -> None:
    found = answer(halve(PLAN, MadeTrials(bowl(2e-3), updates=100)))
    assert found.outcome == "too early"
    assert "No rung has ended" in str(found)


def test_the_paired_interval_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(size=12)
    one, other = common + 0.1 + 0.05 * rng.normal(size=12), common
    found = excess(RateResult(one.mean(), losses=tuple(one)), RateResult(other.mean(), losses=tuple(other)))
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_the_excess_of_a_failed_trial_is_infinite() -> None:
    failed = RateResult(math.inf, False, failed="the loss is nan at update 3")
    assert excess(failed, RateResult(2.0, losses=(2.0, 2.0))).low == math.inf


def test_noise_that_rates_share_drops_out_and_their_own_does_not() -> None:
    shared = answer(halve(PLAN, MadeTrials(bowl(2e-3), fails_at=0.03, shared=1.0)))
    own = answer(halve(PLAN, MadeTrials(bowl(2e-3), fails_at=0.03, noise=1.0)))
    assert shared.best is not None
    assert shared.best.value == 2e-3
    assert own.best is not None
    assert shared.best.high is not None
    assert own.best.high is None or own.best.high > shared.best.high


def test_the_trend_of_the_safe_rate_is_the_least_squares_line() -> None:
    by_rung = {150: 8e-3, 450: 4e-3, 1350: 4e-3, 4050: 2e-3}
    found = safe_trend(by_rung, 10_000)
    assert found is not None
    x, y = np.log(list(by_rung)), np.log(list(by_rung.values()))
    line = stats.linregress(x, y)
    assert found.slope == pytest.approx(line.slope, abs=1e-12)
    half = line.stderr * stats.t.ppf(0.975, 2)
    assert found.high - found.slope == pytest.approx(half, abs=1e-9)
    assert found.at_horizon.value == pytest.approx(math.exp(line.intercept + line.slope * math.log(10_000)), abs=1e-12)
    assert safe_trend({150: 1e-3, 450: 1e-3}, 10_000) is None


def test_a_search_that_ends_before_the_horizon_says_that_the_rest_is_extrapolated() -> None:
    made = MadeTrials(bowl(2e-3), fails_at=0.03, updates=9000)
    text = str(answer(halve(replace(PLAN, horizon=10_000), made)))
    assert "Safe to 1,350 updates; at the horizon of 10,000, extrapolated from 3 rungs" in text
    assert "not shown" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 0.0},
        {"horizon": 5},
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"delta": 0.0},
        {"warmup": 1500},
    ],
)
def test_wrong_plans_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(PLAN, **wrong)  # type: ignore[arg-type]


def test_no_trial_runs_twice() -> None:
    made = MadeTrials(bowl(1e-3, depth=0.01), fails_at=0.03, noise=0.05)
    halve(PLAN, made)
    assert len(made.asked) == len(set(made.asked))
