"""The intervals over seeds, and the decisions by them. The unit of replication is the seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import special

__all__ = ["LEVEL", "Interval", "Region", "holm", "share_interval", "slope", "t_interval", "t_outside"]

LEVEL = 0.95
TAIL = (1 - LEVEL) / 2  # one-sided level of each end of an interval, and of what Holm leaves as decided
MOST_SEEDS = 1000  # beyond it a decision is called out of reach
Verdict = Literal["reproduced", "contradicted", "not reproduced", "inconclusive"]
Count = tuple[float, float]  # (number of successes, total)


@dataclass(frozen=True)
class Region:
    """The open interval (low, high) of an effect."""

    low: float = -math.inf
    high: float = math.inf

    def holds(self, low: float, high: float) -> bool:
        """True if the interval from ``low`` to ``high`` lies wholly inside the region."""
        return self.low < low and high < self.high

    def excludes(self, low: float, high: float) -> bool:
        """True if the interval from ``low`` to ``high`` lies wholly outside the region."""
        return high <= self.low or low >= self.high

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"< {self.high:g}"
        return f"> {self.low:g}" if math.isinf(self.high) else f"in ({self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds with its 95 % interval. The bounds are NaN for a single seed, which gives no interval."""

    mean: float
    low: float
    high: float
    n: int


def t_interval(values: Iterable[float], *, log: bool = False) -> Interval:
    """Return the mean of ``values`` with Student's 95 % t-interval. ``log``: True for the geometric mean; all values
    must then be > 0, or the result is NaN."""
    sample = _logs(values) if log else np.asarray(list(values), dtype=float)
    n = len(sample)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    with np.errstate(invalid="ignore"):  # one infinite value leaves no interval
        mean = float(sample.mean())
        half = float(_student(n - 1) * sample.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    middle, low, high = (_exp(end) if log else end for end in (mean, mean - half, mean + half))
    return Interval(middle, low, high, n)


def _student(freedom: float) -> float:
    """Returns the quantile of Student's t beyond which a tail of the interval lies, at these degrees of freedom."""
    return float(special.stdtrit(freedom, 1 - TAIL))  # stats.t.ppf, without a second of imports


def _logs(values: Iterable[float]) -> np.ndarray:
    sample = np.asarray(list(values), dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sample > 0, np.log(np.where(sample > 0, sample, 1)), np.nan)


def _exp(x: float) -> float:
    """Return exp(x), inf beyond the largest float: ratios of two seeds may differ by a hundred decades."""
    with np.errstate(over="ignore"):
        return float(np.exp(x))


def t_outside(values: Iterable[float], region: Region, *, log: bool = False) -> float:
    """Return p of the one-sided t test of the hypothesis that the mean does not lie in ``region``: the larger p of the
    region's two ends (Schuirmann's two one-sided tests). It is below .025 exactly if the 95 % interval lies inside the
    region. NaN for fewer than two values, or if one is not finite."""
    sample = _logs(values) if log else np.asarray(list(values), dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return math.nan
    mean, error = float(sample.mean()), float(sample.std(ddof=1)) / math.sqrt(len(sample))
    found = 0.0
    for end, side in ((region.low, 1.0), (region.high, -1.0)):
        if math.isinf(end):
            continue
        if log and end <= 0:  # below every ratio
            found = max(found, float(side < 0))
            continue
        away = side * (mean - (math.log(end) if log else end))
        if error > 0:
            found = max(found, float(special.stdtr(len(sample) - 1, -away / error)))
        elif away <= 0:
            found = 1.0
    return found


def decide(low: float, high: float, reproduced: Region, contradicted: Region | None) -> Verdict:
    """Return the decision of an interval: "reproduced" if it lies wholly inside the first region, "contradicted" if
    wholly inside the second, "not reproduced" if wholly outside the first but not inside the second. Otherwise, and
    without an interval, "inconclusive"."""
    if reproduced.holds(low, high):
        return "reproduced"
    if contradicted is not None and contradicted.holds(low, high):
        return "contradicted"
    return "not reproduced" if reproduced.excludes(low, high) else "inconclusive"


def seeds_needed(
    values: Sequence[float], reproduced: Region, contradicted: Region | None, *, log: bool = False
) -> int | None:
    """Return the smallest n at which the sample's own mean and standard deviation would decide; None if no n within
    reach does."""
    sample = _logs(values) if log else np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return None
    mean, deviation = float(sample.mean()), float(sample.std(ddof=1))
    for n in range(2, MOST_SEEDS + 1):
        half = _student(n - 1) * deviation / math.sqrt(n)
        low, high = (_exp(mean - half), _exp(mean + half)) if log else (mean - half, mean + half)
        if decide(low, high, reproduced, contradicted) != "inconclusive":
            return n
    return None


def share_interval(count: float, n: float) -> tuple[float, float]:
    """Return the two ends of the Clopper-Pearson 95 % interval of the share ``count`` / ``n``. It is exact for whole
    numbers. Its ends are quantiles of beta distributions, so ``count`` and ``n`` may also be fractions, as of an
    effective number."""
    low = 0.0 if count <= 0 else float(special.betaincinv(count, n - count + 1, TAIL))
    high = 1.0 if count >= n else float(special.betaincinv(count + 1, n - count, 1 - TAIL))
    return low, high


def effective(counts: Iterable[Count]) -> Count:
    """Return the count and the number of runs that clusters (such as the runs of one seed each) amount to as
    independent runs.

    Korn and Graubard 1998 (Survey Methodology 24, 193-201): n_eff = p (1 - p) / var(p), where var(p) is the ratio
    estimator's variance over the clusters. This is multiplied by the square of t's quantile at n - 1 over that at
    (clusters - 1) degrees of freedom, and is at most n. If the clusters show no spread (all or none), n replaces p (1 -
    p) / var(p). With one run per cluster nothing changes.
    """
    known = [(float(k), float(m)) for k, m in counts if m > 0]
    clusters, n = len(known), sum(m for _, m in known)
    if clusters == n or clusters < 2:
        return sum(k for k, _ in known), n
    share = sum(k for k, _ in known) / n
    scatter = sum((k - share * m) ** 2 for k, m in known)
    variance = clusters / (clusters - 1) * scatter / n**2
    fewer = (_student(n - 1) / _student(clusters - 1)) ** 2
    independent = min(n, (share * (1 - share) / variance if variance > 0 else n) * fewer)
    return share * independent, independent


def binomial_outside(count: float, n: float, region: Region) -> float:
    """Return p of the one-sided exact binomial test of the hypothesis that a share does not lie in ``region``: the
    larger p of the region's two ends. NaN for n = 0."""
    if n <= 0:
        return math.nan
    found = 0.0
    if region.low >= 0:
        found = max(found, 1.0 if count <= 0 else float(special.betainc(count, n - count + 1, min(region.low, 1.0))))
    if region.high <= 1:
        found = max(found, 1.0 if count >= n else float(special.betaincc(count + 1, n - count, max(region.high, 0.0))))
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of y on x. If x and y are logarithms, it is the exponent of a power law."""
    return float(_line(x, y).slope)


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    return float(_line(x, y).rvalue) ** 2


def _line(x: Sequence[float], y: Sequence[float]) -> Any:
    from scipy import stats

    return stats.linregress(x, y)


def aic(x: np.ndarray, y: np.ndarray, parameters: int = 3) -> float:
    """Return Akaike's criterion of the least-squares line of y on x with Gaussian residuals: n log(RSS / n) + 2
    parameters.

    ``parameters`` counts the line's two coefficients, the variance, and further parameters that shaped x. Lower is
    better. Terms that all models have in common are left out.
    """
    a, b = np.polynomial.polynomial.polyfit(x, y, 1)
    noise = float(np.mean((y - a - b * x) ** 2))
    return len(y) * math.log(max(noise, 1e-24 * float(np.mean(y**2)), np.finfo(float).tiny)) + 2 * parameters


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values adjusted by Holm's method, in the given order. NaN stands for no test and stays NaN."""
    adjusted = [math.nan] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    running = 0.0
    for rank, (p, place) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[place] = running
    return adjusted
