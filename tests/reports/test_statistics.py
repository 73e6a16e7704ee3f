"""Intervals over seeds against simulation, closed forms and examples worked by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from stabilitylab.reports.statistics import (
    TAIL,
    Region,
    binomial_outside,
    decide,
    effective,
    holm,
    r_squared,
    seeds_needed,
    share_interval,
    slope,
    t_interval,
    t_outside,
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
        (-1, 0.1, "not reproduced"),
        (0.2, 0.8, "not reproduced"),
        (-1, 1.1, "inconclusive"),
        (1, 2, "inconclusive"),  # the border belongs to neither
    ],
)
def test_an_interval_decides_where_it_lies_wholly_inside(low: float, high: float, verdict: str) -> None:
    assert decide(low, high, ONE, OTHER) == verdict


@pytest.mark.parametrize(
    ("low", "high", "reproduced", "contradicted", "verdict"),
    [
        (-2, -1, ONE, None, "not reproduced"),  # what no interval contradicts
        (-0.5, 0.5, ONE, OTHER, "not reproduced"),  # reaches into X, and no further
        (1.5, 2, Region(-1, 1), None, "not reproduced"),  # beyond an R with two ends
        (-2, -1, Region(-1, 1), None, "not reproduced"),  # the border belongs to neither
        (-2, 2, Region(-1, 1), None, "inconclusive"),
        (math.nan, math.nan, ONE, OTHER, "inconclusive"),
    ],
)
def test_what_excludes_r_is_not_reproduced(
    low: float, high: float, reproduced: Region, contradicted: Region | None, verdict: str
) -> None:
    assert decide(low, high, reproduced, contradicted) == verdict


REGIONS = (Region(low=0.4), Region(high=1.1), Region(0.3, 1.4), Region(low=-1), Region(high=-0.2), Region(0, 2))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_p_falls_below_a_fortieth_exactly_where_the_interval_lies_inside(region: Region, log: bool) -> None:
    draw = np.random.default_rng(11)
    seen = set()
    for _ in range(600):
        sample = draw.uniform(-0.2, 1.2) + draw.uniform(0, 0.6) * draw.standard_normal(draw.integers(2, 9))
        values = np.exp(sample).tolist() if log else sample.tolist()
        found, p = t_interval(values, log=log), t_outside(values, region, log=log)
        assert (p < TAIL) == region.holds(found.low, found.high), (values, p)
        assert 0 <= p <= 1
        seen.add(p < TAIL)
    low, high = (math.log(max(end, 1e-9)) if log else end for end in (region.low, region.high))
    assert seen == {True, False} or high < -0.2 or low < -1 or (log and region.high <= 0), "the property was not tried"


def test_p_is_scipys_on_one_side_and_the_larger_of_two() -> None:
    sample = [0.9, 1.4, 1.3, 2.0]
    above, below = (
        stats.ttest_1samp(sample, end, alternative=side).pvalue for end, side in ((1, "greater"), (2, "less"))
    )
    assert t_outside(sample, Region(low=1)) == pytest.approx(above)
    assert t_outside(sample, Region(1, 2)) == pytest.approx(max(above, below))
    assert t_outside(np.exp(sample).tolist(), Region(low=math.e), log=True) == pytest.approx(above)


@pytest.mark.parametrize(
    ("sample", "region", "log", "p"),
    [
        ([1.0], ONE, False, math.nan),
        ([1.0, math.inf], ONE, False, math.nan),
        ([2.0, 2.0], ONE, False, 0.0),  # without scatter: inside, or not
        ([1.0, 1.0], ONE, False, 1.0),
        ([2.0, 3.0], Region(high=0), True, 1.0),  # no ratio lies below 0
        ([2.0, 3.0], Region(low=-1), True, 0.0),  # and each above -1
    ],
)
def test_p_at_its_ends(sample: list[float], region: Region, log: bool, p: float) -> None:
    assert t_outside(sample, region, log=log) == pytest.approx(p, nan_ok=True)


@pytest.mark.parametrize(("count", "n"), [(0, 6), (3, 8), (6, 6), (17, 20)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_the_binomial_test_is_scipys(count: int, n: int, share: float) -> None:
    greater, less = (float(stats.binomtest(count, n, share, side).pvalue) for side in ("greater", "less"))
    assert binomial_outside(count, n, Region(low=share)) == pytest.approx(greater)
    assert binomial_outside(count, n, Region(high=share)) == pytest.approx(less)
    between = binomial_outside(count, n, Region(0.05, share))
    assert between == pytest.approx(max(less, float(stats.binomtest(count, n, 0.05, "greater").pvalue)))
    assert math.isnan(binomial_outside(0, 0, Region(low=share)))


def test_p_of_a_share_falls_below_a_fortieth_exactly_where_its_interval_lies_inside() -> None:
    draw = np.random.default_rng(12)
    for _ in range(400):
        n = draw.uniform(1, 30)
        count, region = draw.uniform(0, n), Region(*sorted(draw.uniform(0, 1, 2)))
        assert (binomial_outside(count, n, region) < TAIL) == region.holds(*share_interval(count, n))


def test_shares_of_three_seeds_by_hand() -> None:
    """Korn and Graubard: p = 24/45; residuals -2, 1, 1; var = 3/2 * 6 / 45^2; n_eff = p (1 - p) / var = 56, of which
    the quantiles of t leave (2.0154 / 4.3027)^2: 12.29."""
    count, n = effective([(6, 15), (9, 15), (9, 15)])
    assert n == pytest.approx(56 * (2.015368 / 4.302653) ** 2, rel=1e-5)
    assert count / n == pytest.approx(24 / 45)
    assert share_interval(count, n) == pytest.approx((0.24, 0.81), abs=0.002)


@pytest.mark.parametrize("counts", [[(1, 1), (0, 1), (1, 1), (1, 1)], [(1, 1)] * 6, [(0, 1)] * 7])
def test_with_one_run_a_seed_it_is_clopper_and_pearson(counts: list[tuple[int, int]]) -> None:
    count, n = effective(counts)
    assert (count, n) == (sum(k for k, _ in counts), len(counts))
    found = stats.binomtest(int(count), int(n)).proportion_ci(0.95, "exact")
    assert share_interval(count, n) == pytest.approx((found.low, found.high))


def test_where_all_seeds_agree_the_number_is_still_that_of_seeds() -> None:
    """21 of 21 runs of three seeds: not 21 independent ones."""
    count, n = effective([(7, 7)] * 3)
    assert count == n == pytest.approx(21 * (2.085963 / 4.302653) ** 2, rel=1e-5)
    assert share_interval(count, n)[0] < share_interval(21, 21)[0]


def test_shares_never_leave_0_and_1() -> None:
    draw = np.random.default_rng(13)
    for _ in range(500):
        counts = [(float(draw.integers(0, m + 1)), float(m)) for m in draw.integers(0, 12, draw.integers(2, 9))]
        count, n = effective(counts)
        if n:
            low, high = share_interval(count, n)
            assert 0 <= low <= count / n <= high <= 1, counts


@pytest.mark.parametrize(("seeds", "runs", "share"), [(3, 15, 0.5), (4, 16, 0.3), (6, 10, 0.8), (6, 5, 0.1)])
def test_the_interval_of_clustered_shares_covers(seeds: int, runs: int, share: float) -> None:
    """Runs of one seed share a fate (beta-binomial, correlation .2): the binomial interval alone would not hold."""
    draw = np.random.default_rng(seeds)
    both = share * 4, (1 - share) * 4
    counts = draw.binomial(runs, draw.beta(*both, size=(1500, seeds)))
    ours, plain = [], []
    for found in counts:
        low, high = share_interval(*effective([(int(k), runs) for k in found]))
        ours.append(low <= share <= high)
        low, high = share_interval(int(found.sum()), seeds * runs)
        plain.append(low <= share <= high)
    assert np.mean(ours) >= 0.93
    if runs >= 10:
        assert np.mean(plain) < 0.92, "the guard: counted over runs it is too narrow"


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


def test_a_mean_on_the_border_needs_more_seeds_than_there_are() -> None:
    assert seeds_needed([0.9, 1.0, 1.1], ONE, OTHER) is None
    assert seeds_needed([0.4, 0.5, 0.6], ONE, OTHER) == 3  # between the regions: not reproduced
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


@pytest.mark.slow
def test_tails_are_those_of_scipy_stats_without_importing_it() -> None:
    sample = [0.3, 0.5, 0.9]
    expected = stats.ttest_1samp(sample, 0.1, alternative="greater").pvalue
    assert t_outside(sample, Region(low=0.1)) == pytest.approx(expected, rel=1e-12)
    assert t_interval(sample).high == pytest.approx(stats.t(2, np.mean(sample), stats.sem(sample)).ppf(1 - TAIL))
    code = "from stabilitylab.reports.statistics import t_interval; t_interval([1.0, 2.0]); import sys; "
    command = [sys.executable, "-c", f"{code}print('scipy.stats' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"
