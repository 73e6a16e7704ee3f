"""The measures of a forecast: order within cells, hits at few false alarms, errors of edges, intervals over
architectures."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

CELL = ["layers", "warmup", "k", "shift"]  # in which architectures are compared
ALARMS, QUANTILE = 0.05, 0.8
DRAWS = 2000  # of the bootstrap over architectures


def pairs(rows: pd.DataFrame, names: list[str]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(architecture that failed, one that trained, name -> 1, 1/2 or 0) of all pairs within cells."""
    one, other, right = [], [], {name: [] for name in names}
    for _, cell in rows.groupby(CELL):
        bad, good = cell[cell["fails"] == 1], cell[cell["fails"] == 0]
        i, j = (grid.ravel() for grid in np.meshgrid(np.arange(len(bad)), np.arange(len(good)), indexing="ij"))
        apart = bad["arch"].to_numpy()[i] != good["arch"].to_numpy()[j]
        one.append(bad["arch"].to_numpy()[i[apart]])
        other.append(good["arch"].to_numpy()[j[apart]])
        for name in names:
            gap = bad[name].to_numpy()[i[apart]] - good[name].to_numpy()[j[apart]]
            right[name].append(np.where(np.abs(gap) < 1e-12, 0.5, gap > 0))
    return _joined(one), _joined(other), {name: _joined(parts) for name, parts in right.items()}


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def auc(rows: pd.DataFrame, names: list[str], draws: int = 0) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(AUC within cells, the same in each draw of architectures) of each forecaster."""
    one, other, right = pairs(rows, names)
    if not len(one):
        return dict.fromkeys(names, math.nan), {name: np.full(draws, math.nan) for name in names}
    archs, codes = np.unique(np.concatenate([one, other]).astype(str), return_inverse=True)
    first, second = codes[: len(one)], codes[len(one) :]
    random = np.random.default_rng(0)
    drawn: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(draws):
        count = np.bincount(random.integers(0, len(archs), len(archs)), minlength=len(archs))
        weight = (count[first] * count[second]).astype(float)
        for name in names:
            drawn[name].append(float(weight @ right[name] / weight.sum()) if weight.sum() else math.nan)
    return {name: float(right[name].mean()) for name in names}, {name: np.array(own) for name, own in drawn.items()}


def contested(grid: pd.DataFrame) -> pd.DataFrame:
    """The cells in which some fail and some train."""
    share = grid.groupby(CELL)["fails"].transform("mean")
    return grid[(share > 0) & (share < 1)].reset_index(drop=True)


def hit_rate(fails: np.ndarray, p: np.ndarray) -> float:
    """Share of the failures that are called at a threshold which calls at most 5 % of the others."""
    if not (fails == 1).any() or not (fails == 0).any():
        return math.nan
    others = np.sort(p[fails == 0])[::-1]
    allowed = int(ALARMS * len(others))
    return float((p[fails == 1] > others[allowed]).mean())


def error_by_arch(edges: pd.DataFrame, name: str) -> pd.Series:
    """|log10(predicted / true)|, mean over the cases of each architecture."""
    return (edges[name] - edges["true"]).abs().groupby(edges["arch"]).mean().dropna()


def spread(edges: pd.DataFrame, name: str) -> float:
    """Decades that hold 80 % of the errors."""
    return float((edges[name] - edges["true"]).abs().quantile(QUANTILE))


def interval(draws: np.ndarray) -> tuple[float, float]:
    own = draws[np.isfinite(draws)]
    return (float(np.quantile(own, 0.025)), float(np.quantile(own, 0.975))) if len(own) else (math.nan, math.nan)


def resampled(values: np.ndarray, of: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """The interval of ``of`` over architectures drawn anew."""
    random = np.random.default_rng(0)
    return interval(np.array([of(random.choice(values, len(values))) for _ in range(DRAWS * bool(len(values)))]))
