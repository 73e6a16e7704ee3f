"""Differences between the losses of two trials over the same batches, with their interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .search import RateResult

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Excess:
    """The mean by which one loss lies above another, and half the width of its 95 % interval (inf with fewer than two
    pairs)."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def excess(of: RateResult, over: RateResult) -> Excess:
    """Return by how much the loss of one trial exceeds that of another, paired over the parts of their losses.

    The interval is Student's t-interval of the mean difference. A trial that failed exceeds any other by inf.
    """
    if of.failed or not math.isfinite(of.loss):
        return Excess(math.inf, 0.0)
    if of is over:
        return Excess(0.0, 0.0)
    if len(of.losses) != len(over.losses) or len(of.losses) < 2:
        return Excess(of.loss - over.loss, math.inf)
    difference = np.array(of.losses) - np.array(over.losses)
    return Excess(of.loss - over.loss, half_width(difference.std(ddof=1) / math.sqrt(len(difference)), len(difference)))


def half_width(error: float, count: int) -> float:
    """Return half the width of the t-interval of a mean with standard error ``error`` of ``count`` numbers."""
    return float(error) * t_quantile(count - 1)


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t; inf with no degree of freedom."""
    if freedom < 1:
        return math.inf
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation inside groups, pooled, and its degrees of freedom; (NaN, 0) if no group has two
    numbers."""
    squares, freedom = 0.0, 0
    for group in groups:
        values = np.array([value for value in group if math.isfinite(value)])
        if len(values) > 1:
            squares += float(((values - values.mean()) ** 2).sum())
            freedom += len(values) - 1
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)
