"""Metrics of every row at the beginning of a training: the gradient's norm, parts of it, and its roughness."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..collection import Record

LEAST = 200  # updates that the comparison of roughness needs one by one
TOTAL, LOSS, OUTSIDE = "grad_norm_total", "nll", "grad_norm_nonbranch"
Values = Callable[[Record], np.ndarray]


def total(record: Record) -> np.ndarray:
    """Reads the global gradient norm."""
    return column(record, TOTAL)


def non_branch(record: Record) -> np.ndarray:
    """Reads (i) the norm over the parameters outside the branches, undivided."""
    return column(record, OUTSIDE)


def decoder_branches(record: Record) -> np.ndarray:
    """Divide (ii) the norm over the decoder's branch weights by alpha, to which their gradient is proportional; NaN
    if alpha is 0."""
    return column(record, "grad_norm_branch_decoder") / _alpha(record)


def encoder_branches(record: Record) -> np.ndarray:
    """Divide (iii) the norm over the encoder's branch weights by alpha squared, since cross-attention multiplies their
    gradient by alpha once more; NaN if alpha is 0."""
    return column(record, "grad_norm_branch_encoder") / _alpha(record) ** 2


def column(record: Record, name: str) -> np.ndarray:
    """Reads a metric of every row; NaN where the run does not have it."""
    data = record.metrics
    return data[name].to_numpy(float) if name in data else np.full(len(data), np.nan)


def _alpha(record: Record) -> np.ndarray:
    """Read alpha_t of BranchNorm, with NaN for 0; 1 for every other architecture."""
    alpha = np.nan_to_num(column(record, "alpha"), nan=1.0)
    return np.where(alpha == 0, np.nan, alpha)


def steps_of(record: Record) -> np.ndarray:
    return record.metrics["step"].to_numpy(int)


def complete(record: Record, name: str, last: int) -> bool:
    """Return True if the metric was recorded, and is finite, at each of the steps 0 to ``last``."""
    here = steps_of(record) <= last
    return bool(here.sum() == last + 1 and np.isfinite(column(record, name)[here]).all())


def roughness(record: Record, values: Values) -> float:
    """Return the standard deviation of successive differences of the log norm over steps 1 to 200; NaN if it is
    undefined or 0."""
    steps = steps_of(record)
    with np.errstate(divide="ignore", invalid="ignore"):
        moves = np.diff(np.log(values(record)[(steps >= 1) & (steps <= LEAST)]))
    moved = float(moves.std(ddof=1)) if len(moves) > 1 and np.isfinite(moves).all() else 0.0
    return moved or math.nan


def bits(record: Record) -> np.ndarray:
    """Return the training loss per token in bits, as fairseq's nll_loss; the store has nats."""
    return column(record, LOSS) / math.log(2)
