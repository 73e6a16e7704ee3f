"""Fits of three curves through quality against depth, compared by Akaike's criterion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..statistics import aic

LEAST = 5  # depths for three curves to be told apart
EXTRA = 4  # parameters of the saturating curve: two coefficients, the variance, its scale
Shape = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Curve:
    """A curve y = slope * shape(d) + level, fitted by least squares; ``aic`` is that of :func:`statistics.aic`."""

    slope: float
    level: float
    aic: float
    shape: Shape

    def at(self, depths: Sequence[float] | np.ndarray) -> np.ndarray:
        return self.slope * self.shape(np.asarray(depths, float)) + self.level


def curves(depths: Sequence[float], values: Sequence[float]) -> dict[str, Curve]:
    """Fits ``A log d + B``, ``A d + B`` and ``A (1 - exp(-d / c)) + B`` through (depth, value), by name."""
    d, y = np.asarray(depths, float), np.asarray(values, float)
    return {
        "logarithmic": _fit(np.log, d, y),
        "linear": _fit(lambda d: d, d, y),
        "saturating": _fit(_saturating(_scale(d, y)), d, y, EXTRA),
    }


def log_over_best(depths: Sequence[float], values: Sequence[float]) -> float:
    """Subtract the least AIC of the three curves from that of the logarithmic curve with A >= 0; 0 if that is best."""
    found = curves(depths, values)
    log = found["logarithmic"]
    own = log.aic if log.slope >= 0 else len(values) * math.log(np.var(values)) + 2 * 3  # falling values: A = 0
    return own - min(curve.aic for curve in found.values())


def _fit(shape: Shape, d: np.ndarray, y: np.ndarray, parameters: int = 3) -> Curve:
    x = shape(d)
    level, slope = np.polynomial.polynomial.polyfit(x, y, 1)
    return Curve(float(slope), float(level), aic(x, y, parameters), shape)


def _saturating(scale: float) -> Shape:
    return lambda d: 1 - np.exp(-d / scale)


def _scale(d: np.ndarray, y: np.ndarray) -> float:
    """Find the best scale c, from a third of the least depth to three times the largest."""
    from scipy import optimize

    def at(log_scale: float) -> float:
        return aic(_saturating(math.exp(log_scale))(d), y, EXTRA)

    # two local minima are possible, so a grid comes before the search
    grid = np.linspace(math.log(d.min() / 3), math.log(3 * d.max()), 40)
    start = min(grid, key=at)
    step = grid[1] - grid[0]
    found: Any = optimize.minimize_scalar(at, bounds=(start - step, start + step), method="bounded")
    return math.exp(min((start, float(found.x)), key=at))
