"""The measures of a forecast: order within cells, hits at few false alarms, errors of edges, intervals over
architectures. A row counts with its ``share``, where it has one: seeds of one architecture count as one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

CELL = ["layers", "warmup", "k", "shift"]  # in which architectures are compared
ALARMS, QUANTILE = 0.05, 0.8
DRAWS = 2000  # of the bootstrap over architectures


def share(rows: pd.DataFrame) -> np.ndarray:
    return rows["share"].to_numpy(dtype=float) if "share" in rows else np.ones(len(rows))


def pairs(rows: pd.DataFrame, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(architecture that failed, one that trained, share, name -> 1, 1/2 or 0) of all pairs within cells."""
    one, other, shares, right = [], [], [], {name: [] for name in names}
    for _, cell in rows.assign(share=share(rows)).groupby(CELL):
        bad, good = cell[cell["fails"] == 1], cell[cell["fails"] == 0]
        i, j = (grid.ravel() for grid in np.meshgrid(np.arange(len(bad)), np.arange(len(good)), indexing="ij"))
        apart = bad["arch"].to_numpy()[i] != good["arch"].to_numpy()[j]
        i, j = i[apart], j[apart]
        one.append(bad["arch"].to_numpy()[i])
        other.append(good["arch"].to_numpy()[j])
        shares.append(bad["share"].to_numpy()[i] * good["share"].to_numpy()[j])
        for name in names:
            gap = bad[name].to_numpy()[i] - good[name].to_numpy()[j]
            right[name].append(np.where(np.abs(gap) < 1e-12, 0.5, gap > 0))
    return _joined(one), _joined(other), _joined(shares), {name: _joined(parts) for name, parts in right.items()}


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def auc(rows: pd.DataFrame, names: list[str], draws: int = 0) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(AUC within cells, the same in each draw of architectures) of each forecaster."""
    one, other, shares, right = pairs(rows, names)
    if not len(one):
        return dict.fromkeys(names, math.nan), {name: np.full(draws, math.nan) for name in names}
    archs = np.unique(rows["arch"].astype(str))  # draws are the same for all rows of these architectures
    first, second = np.searchsorted(archs, one.astype(str)), np.searchsorted(archs, other.astype(str))
    random = np.random.default_rng(0)
    drawn: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(draws):
        count = np.bincount(random.integers(0, len(archs), len(archs)), minlength=len(archs))
        weight = count[first] * count[second] * shares
        for name in names:
            drawn[name].append(float(weight @ right[name] / weight.sum()) if weight.sum() else math.nan)
    areas = {name: float(shares @ right[name] / shares.sum()) for name in names}
    return areas, {name: np.array(own) for name, own in drawn.items()}


def contested(grid: pd.DataFrame) -> pd.DataFrame:
    """The cells in which some fail and some train."""
    part = grid.groupby(CELL)["fails"].transform("mean")
    return grid[(part > 0) & (part < 1)].reset_index(drop=True)


def hit_rate(rows: pd.DataFrame, name: str) -> float:
    """Share of the failures that are called at a threshold which calls at most 5 % of the others."""
    p, fails, weight = rows[name].to_numpy(), rows["fails"].to_numpy() == 1, share(rows)
    if fails.all() or not fails.any():
        return math.nan
    order = np.argsort(-p[~fails], kind="stable")
    called = np.cumsum(weight[~fails][order])
    threshold = p[~fails][order][np.argmax(called > ALARMS * called[-1])]
    return float(weight[fails] @ (p[fails] > threshold) / weight[fails].sum())


def brier(rows: pd.DataFrame, name: str) -> float:
    return float(np.average((rows[name] - rows["fails"]) ** 2, weights=share(rows))) if len(rows) else math.nan


def error_by_arch(edges: pd.DataFrame, name: str) -> pd.Series:
    """|log10(predicted / true)|, mean over the cases of each architecture."""
    return (edges[name] - edges["true"]).abs().groupby(edges["arch"]).mean().dropna()


def spread(edges: pd.DataFrame, name: str) -> float:
    """Decades that hold 80 % of the errors, case by case."""
    return float((edges[name] - edges["true"]).abs().quantile(QUANTILE))


def interval(draws: np.ndarray) -> tuple[float, float]:
    own = draws[np.isfinite(draws)]
    return (float(np.quantile(own, 0.025)), float(np.quantile(own, 0.975))) if len(own) else (math.nan, math.nan)


def resampled(values: np.ndarray, of: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """The interval of ``of`` over architectures drawn anew."""
    random = np.random.default_rng(0)
    return interval(np.array([of(random.choice(values, len(values))) for _ in range(DRAWS * bool(len(values)))]))
