"""Intervals over seeds, and what they decide. The unit of replication is the seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

LEVEL = 0.95
MOST_SEEDS = 1000  # beyond it a decision is called out of reach
Verdict = Literal["reproduced", "contradicted", "inconclusive"]


@dataclass(frozen=True)
class Region:
    """The open interval (low, high) of an effect."""

    low: float = -math.inf
    high: float = math.inf

    def holds(self, low: float, high: float) -> bool:
        return self.low < low and high < self.high

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"< {self.high:g}"
        return f"> {self.low:g}" if math.isinf(self.high) else f"in ({self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` seeds with its 95 % t-interval; NaN bounds where one seed alone gives none."""

    mean: float
    low: float
    high: float
    n: int


def t_interval(values: Iterable[float], *, log: bool = False) -> Interval:
    """Student's t-interval of the mean; with ``log`` of the geometric mean (all values must be > 0, else NaN)."""
    sample = np.asarray(list(values), dtype=float)
    n = len(sample)
    if log:
        with np.errstate(invalid="ignore", divide="ignore"):
            sample = np.where(sample > 0, np.log(np.where(sample > 0, sample, 1)), np.nan)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    with np.errstate(invalid="ignore"):  # one infinite value leaves no interval
        mean = float(sample.mean())
        half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * sample.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    middle, low, high = (_exp(end) if log else end for end in (mean, mean - half, mean + half))
    return Interval(middle, low, high, n)


def _exp(x: float) -> float:
    """Infinite beyond the largest float: ratios of two seeds may lie a hundred decades apart."""
    with np.errstate(over="ignore"):
        return float(np.exp(x))


def decide(low: float, high: float, reproduced: Region, contradicted: Region | None) -> Verdict:
    """Wholly inside R: reproduced; wholly inside X: contradicted; else, or without an interval: inconclusive."""
    if reproduced.holds(low, high):
        return "reproduced"
    return "contradicted" if contradicted is not None and contradicted.holds(low, high) else "inconclusive"


def seeds_needed(
    values: Sequence[float], reproduced: Region, contradicted: Region | None, *, log: bool = False
) -> int | None:
    """The smallest n at which the sample's own mean and standard deviation would decide; None: not within reach."""
    with np.errstate(divide="ignore", invalid="ignore"):
        sample = np.log(values) if log else np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return None
    mean, deviation = float(sample.mean()), float(sample.std(ddof=1))
    for n in range(2, MOST_SEEDS + 1):
        half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * deviation / math.sqrt(n)
        low, high = (_exp(mean - half), _exp(mean + half)) if log else (mean - half, mean + half)
        if decide(low, high, reproduced, contradicted) != "inconclusive":
            return n
    return None


def share_interval(count: int, n: int) -> tuple[float, float]:
    """Clopper-Pearson interval of a share: exact, whatever n."""
    found = stats.binomtest(count, n).proportion_ci(LEVEL, "exact")
    return float(found.low), float(found.high)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of y on x; in logs, the exponent of a power law."""
    fit: Any = stats.linregress(x, y)
    return float(fit.slope)


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    fit: Any = stats.linregress(x, y)
    return float(fit.rvalue) ** 2


def aic(x: np.ndarray, y: np.ndarray, parameters: int = 3) -> float:
    """Akaike's criterion of the least-squares line of y on x with Gaussian residuals: n log(RSS / n) + 2 parameters.

    The parameters are its two coefficients, the variance, and what else shaped x. Lower is better; what all have in
    common is left out.
    """
    a, b = np.polynomial.polynomial.polyfit(x, y, 1)
    noise = float(np.mean((y - a - b * x) ** 2))
    return len(y) * math.log(max(noise, 1e-24 * float(np.mean(y**2)), np.finfo(float).tiny)) + 2 * parameters


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test of seed-paired differences; printed, never decisive."""
    sample = np.asarray(differences, dtype=float)
    if len(sample) < 2 or not sample.any():
        return math.nan
    test: Any = stats.wilcoxon(sample, method="exact" if len(sample) < 25 and sample.all() else "auto")
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given; a NaN is not a test and stays NaN."""
    adjusted = [math.nan] * len(p_values)
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    running = 0.0
    for rank, (p, place) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[place] = running
    return adjusted
