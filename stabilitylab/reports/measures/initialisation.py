"""Gradients of the activations at initialisation, layer by layer."""

from __future__ import annotations

import math

import numpy as np

from ..base import MissingRuns
from ..collection import Record, Runs

TABLE = "activation_grad_norm"


def gradients(record: Record, stack: str) -> dict[int, float]:
    """Maps layer to ||dE/dx_l|| at step 0, x_l the layer's output (that of its feed-forward sub-layer)."""
    data = record.at(TABLE, 0, ["value"])
    data = data[(data["step"] == 0) & (data["stack_name"] == stack) & (data["sublayer"] == "ffn")]
    return dict(zip(data["layer"].tolist(), data["value"].tolist(), strict=True))


def first_over_last(values: dict[int, float]) -> float:
    """Divide the number at the lowest layer by that at the highest; NaN if there are none or the latter is 0."""
    return values[min(values)] / values[max(values)] if values and values[max(values)] else math.nan


def at_initialisation(runs: Runs, label: str, depth: int, table: str) -> dict[int, Record]:
    """Maps seed to a run of ``depth`` layers a side with ``table`` at step 0: one-step runs, or else training runs.

    Raises MissingRuns where there is none.
    """
    own = runs.where(lambda run: _starts(run, table), label=label, layers=(depth, depth), table=table)
    groups = own.where(kind="onestep").groups() or own.where(kind="train").groups()
    if not groups:
        raise MissingRuns(f"needs {label} of {depth} layers a side with {table} at initialisation")
    return groups[0].by_seed()


def _starts(record: Record, table: str) -> bool:
    data = record.at(table, 0, [record.run.table(table).main])
    return len(data) > 0 and data["step"].iloc[0] == 0


def unevenness(record: Record) -> float:
    """Return max / min over the decoder's layers of ||dE/dx_l|| at initialisation, x_l the layer's output.

    The top layer is left out: its gradient has not passed a LayerNorm, which removes two directions from all below.
    """
    found = gradients(record, "decoder")
    below_top = np.array([found[layer] for layer in sorted(found)[:-1]], float)
    return float(below_top.max() / below_top.min()) if len(below_top) > 1 and below_top.min() > 0 else math.nan
