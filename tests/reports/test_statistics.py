"""Intervals over seeds against simulation, closed forms and examples worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from stabilitylab.reports.statistics import (
    Region,
    decide,
    holm,
    r_squared,
    seeds_needed,
    share_interval,
    signed_rank,
    slope,
    t_interval,
)

ONE, OTHER = Region(low=1), Region(high=0)


@pytest.mark.parametrize("n", [3, 5, 6])
def test_the_t_interval_covers_what_it_promises_and_the_bootstrap_would_not(n: int) -> None:
    draw = np.random.default_rng(n)
    samples = 3.0 + 2.0 * draw.standard_normal((2000, n))
    found = [t_interval(sample) for sample in samples]
    covered = np.mean([interval.low < 3 < interval.high for interval in found])
    resampled = np.stack([sample[draw.integers(n, size=(400, n))].mean(1) for sample in samples])
    low, high = np.percentile(resampled, (2.5, 97.5), axis=1)
    # 3.5 standard errors of a share of 2000
    assert covered == pytest.approx(0.95, abs=0.017)
    assert np.mean((low < 3) & (high > 3)) < 0.9


def test_the_interval_is_students() -> None:
    found = t_interval([1, 2, 4])
    mean, sd = 7 / 3, math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2)
    half = 4.302653 * sd / math.sqrt(3)  # t of .975 at 2 degrees of freedom, from a table
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((mean, mean - half, mean + half, 3), rel=1e-6)


def test_ratios_are_averaged_in_logs() -> None:
    plain = t_interval(np.log([0.5, 2.0, 4.0]))
    found = t_interval([0.5, 2.0, 4.0], log=True)
    assert found.mean == pytest.approx(4 ** (1 / 3))
    assert (found.low, found.high) == pytest.approx((math.exp(plain.low), math.exp(plain.high)))


@pytest.mark.parametrize(
    ("values", "log"), [([2.0], False), ([], False), ([1.0, math.inf], False), ([1.0, 0.0], True), ([1.0, -2.0], True)]
)
def test_without_an_interval_nothing_is_decided(values: list[float], log: bool) -> None:
    found = t_interval(values, log=log)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.n == len(values)
    assert decide(found.low, found.high, Region(low=-5), Region(high=-5)) == "inconclusive"
    assert seeds_needed(values, ONE, OTHER, log=log) is None


def test_ratios_a_hundred_decades_apart_have_an_interval() -> None:
    found = t_interval([1e-200, 1.0], log=True)
    assert (found.mean, found.low, found.high) == (pytest.approx(1e-100), 0, math.inf)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 2, "reproduced"),
        (-2, -0.1, "contradicted"),
        (0.9, 2, "inconclusive"),
        (-1, 0.1, "inconclusive"),
        (0.2, 0.8, "inconclusive"),
        (1, 2, "inconclusive"),  # the border belongs to neither
    ],
)
def test_an_interval_decides_where_it_lies_wholly_inside(low: float, high: float, verdict: str) -> None:
    assert decide(low, high, ONE, OTHER) == verdict


def test_what_no_interval_contradicts_is_never_contradicted() -> None:
    assert decide(-2, -1, ONE, None) == "inconclusive"


@pytest.mark.parametrize("log", [False, True])
def test_so_many_seeds_would_decide_and_one_less_would_not(log: bool) -> None:
    sample = [1.0, 2.9, 1.1, 2.0]
    region = Region(low=1.3)
    needed = seeds_needed(sample, region, None, log=log)
    assert needed is not None
    assert needed > 4

    def verdict(n: int) -> str:
        """Of a sample of n with the mean and standard deviation of ours."""
        own = np.log(sample) if log else np.array(sample)
        made = np.array([-1.0, 1.0] * (n // 2) + [0.0] * (n % 2))
        made = own.mean() + made / made.std(ddof=1) * own.std(ddof=1)
        found = t_interval(np.exp(made) if log else made, log=log)
        return decide(found.low, found.high, region, None)

    assert (verdict(needed), verdict(needed - 1)) == ("reproduced", "inconclusive")


def test_a_mean_between_the_regions_needs_more_seeds_than_there_are() -> None:
    assert seeds_needed([0.4, 0.5, 0.6], ONE, OTHER) is None
    assert seeds_needed([0.5], ONE, OTHER) is None


@pytest.mark.parametrize("n", [1, 6, 17])
def test_clopper_pearson_at_the_ends_has_a_closed_form(n: int) -> None:
    edge = 0.025 ** (1 / n)
    assert share_interval(0, n) == pytest.approx((0, 1 - edge))
    assert share_interval(n, n) == pytest.approx((edge, 1))


def test_clopper_pearson_leaves_a_fortieth_in_each_tail() -> None:
    def tail(p: float, counts: range) -> float:
        return sum(math.comb(8, k) * p**k * (1 - p) ** (8 - k) for k in counts)

    low, high = share_interval(3, 8)
    assert tail(low, range(3, 9)) == pytest.approx(0.025)
    assert tail(high, range(4)) == pytest.approx(0.025)


def test_holm_by_hand() -> None:
    # sorted .01 .02 .03 .04: times 4, 3, 2, 1 = .04 .06 .06 .04, never falling
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.6]) == [1, 1]


def test_a_test_that_was_not_made_is_not_corrected_for() -> None:
    adjusted = holm([math.nan, 0.02, 0.04])
    assert math.isnan(adjusted[0])
    assert adjusted[1:] == pytest.approx([0.04, 0.04])
    assert holm([]) == []


def test_the_smallest_p_of_few_pairs() -> None:
    assert signed_rank([1, 2, 3, 4, 5]) == pytest.approx(2 / 2**5)
    assert signed_rank([1, 2, 3, 4, 5, 6]) == pytest.approx(2 / 2**6)
    assert signed_rank([1, 2, -3]) == pytest.approx(1)
    assert math.isnan(signed_rank([0, 0, 0]))
    assert math.isnan(signed_rank([1]))


def test_a_line_through_points() -> None:
    draw = np.random.default_rng(1)
    x = draw.random(20)
    y = 3 * x + draw.random(20)
    assert slope(x.tolist(), y.tolist()) == pytest.approx(np.polyfit(x, y, 1)[0])
    assert r_squared(x.tolist(), y.tolist()) == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
    depths = [6.0, 12.0, 50.0]
    assert slope(np.log(depths).tolist(), [1.5 * math.log(n) + 7 for n in depths]) == pytest.approx(1.5)


def test_regions_say_what_they_are() -> None:
    assert [str(Region(high=2)), str(Region(low=0.5)), str(Region(-1, 1))] == ["< 2", "> 0.5", "in (-1, 1)"]


def test_students_distribution_is_not_the_normal_one() -> None:
    """The guard that the factor is t's: with the normal quantile coverage at n = 3 would be .81."""
    found = t_interval([0.0, 1.0, 2.0])
    assert (found.high - found.mean) * math.sqrt(3) > 2 * stats.norm.ppf(0.975)
