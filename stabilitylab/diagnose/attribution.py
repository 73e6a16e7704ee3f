"""The attribution of the gradient norm: the share of each group of parameters in its square."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schema import Row
from .evidence import Evidence
from .order import describe

TABLE = "grad_norm"
NAMED = 3  # groups that a sentence names
LISTED = 20  # groups of a row that diagnose --json lists


@dataclass(frozen=True)
class Attribution:
    """The shares of a row in the squared gradient norm, the largest first: of each sub-layer of a layer, and of each
    module outside the layers, such as an embedding or the head."""

    step: int
    shares: tuple[tuple[Row, float], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "shares": {describe(row): share for row, share in self.shares[:LISTED]}}

    def words(self) -> str:
        """Name the largest shares: ``step 59: 95 % lm_head, 2 % transformer.wte``."""
        shown = [f"{percent(share)} {describe(row)}" for row, share in self.shares[:NAMED] if share > 0]
        return f"step {self.step}: {', '.join(shown) or 'every gradient is exactly 0'}"


def shares_of(norms: np.ndarray) -> np.ndarray:
    """Return ||g_i||^2 / sum_j ||g_j||^2 of the gradient norms of groups, (..., groups). A row with a norm that is not
    finite is NaN; a row of zeros has shares of 0.

    Since the groups divide all parameters, the sum is the square of the gradient norm of the whole model.
    """
    largest = np.max(norms, axis=-1, keepdims=True, initial=0.0)
    usual = np.isfinite(norms).all(-1, keepdims=True)
    scaled = np.where(usual, norms, 0.0) / np.where(usual & (largest > 0), largest, 1.0)  # 1e-200 has a square too
    squares = np.square(scaled)
    total = squares.sum(-1, keepdims=True)
    return np.where(usual, squares / np.where(total > 0, total, 1.0), np.nan)


def attribution(evidence: Evidence, *steps: int) -> tuple[Attribution, ...]:
    """Return the shares of the first and of the last recorded row, and of the last row up to each of ``steps``. Rows in
    which a gradient is not finite are left out. The result is empty if ``grad_norm`` was not recorded.

    The shares are of the table ``grad_norm`` alone: before clipping, with biases and norms. The definition is our own.
    """
    grid = evidence.grid(TABLE)
    if grid is None:
        return ()
    shares = shares_of(np.where(grid.absent, 0.0, grid.values))
    known = np.flatnonzero(np.isfinite(shares).all(1))
    if not len(known):
        return ()
    wanted = {known[0], known[-1]}
    wanted |= {before[-1] for step in steps if len(before := known[grid.steps[known] <= step])}
    return tuple(_of_row(int(grid.steps[at]), grid.rows, shares[at]) for at in sorted(wanted))


def attributed(found: Sequence[Attribution]) -> str:
    """Return the shares of the last row in words, then those of the others, the latest first; "" for none."""
    return "; ".join(one.words() for one in reversed(found))


def percent(share: float) -> str:
    """Write a share: ``95 %``, ``0.3 %``, ``below 0.1 %``."""
    number = 100 * share
    return f"{number:.0f} %" if number >= 0.95 else f"{number:.1f} %" if number >= 0.1 else "below 0.1 %"


def _of_row(step: int, rows: Sequence[Row], shares: np.ndarray) -> Attribution:
    order = np.argsort(-shares, kind="stable")
    return Attribution(step, tuple((rows[at], float(shares[at])) for at in order))
