"""The order of the numbers of a row, by what they depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..schema import Row

# The points of row t, in the order of dependence: the numbers of a point depend on those of the points before it. Two
# phases of one point depend on the same numbers, so neither comes first. Three phases are not phases of tables:
# "between" is what reached the row from outside (weights that something other than an update changed, the schedule's
# alpha, the batch); "loss" is the loss; "setting" is a learning rate, which depends on nothing, and on which the update
# alone depends.
POINTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("between",), "nothing in the run"),
    (("step", "reference"), "theta_t alone"),
    (("forward",), "theta_t and the batch"),
    (("loss",), "the forward pass"),
    (("backward",), "the forward pass and the loss"),
    (("setting",), "nothing in the run"),
    (("update",), "the gradients and the learning rate"),
)
PHASES = tuple(phase for phases, _ in POINTS for phase in phases)
RATES = ("lr", "learning_rate")
OUTSIDE = ("alpha", "tokens", "epoch")
CLOCKS = ("tokens_per_second", "memory_bytes", "seconds")  # differ between any two runs, even identical ones


def phase_of_metric(name: str) -> str:
    if name in RATES or name in OUTSIDE:
        return "setting" if name in RATES else "between"
    if name.startswith(("held_out", "source_worth", "encoder_distance")):
        return "reference"
    return "backward" if name.startswith("grad") else "loss"


def rank(phase: str) -> int:
    """Return the position of a phase's point in :data:`POINTS`."""
    return next(place for place, (phases, _) in enumerate(POINTS) if phase in phases)


def comes_before(a: str, b: str) -> bool:
    """True if the numbers of phase ``b`` depend on those of phase ``a`` of the same row."""
    return rank(a) < rank(b) and (a != "setting" or b == "update") and b != "setting"


def depends_on(phase: str) -> str:
    """Say in words what the numbers of a phase depend on."""
    return POINTS[rank(phase)][1]


def first_place(bad: np.ndarray, phase: str) -> int:
    """Return the row that is computed first among the rows that are ``bad``: the highest in a backward pass, else the
    lowest. Tables list their rows from the input to the output."""
    rows = np.flatnonzero(bad)
    return int(rows[-1] if phase == "backward" else rows[0])


def describe(row: Row | None) -> str:
    """Name a place: ``layer 3 of encoder (self_attn)``, or the name of the site outside the layers."""
    if row is None:
        return "the whole model"
    if row.layer < 1:
        return row.site or row.stack or "the whole model"
    part = f" ({row.sublayer})" if row.sublayer else ""
    return f"layer {row.layer}{f' of {row.stack}' if row.stack else ''}{part}"


def gathered(rows: Sequence[Row], chosen: Sequence[int]) -> list[str]:
    """Name the chosen places. A layer all of whose places are chosen comes once, without its sub-layers."""
    picked = {rows[place] for place in chosen}
    whole = {(row.stack, row.layer) for row in picked if row.layer}
    whole -= {(row.stack, row.layer) for row in rows if row not in picked}
    names = [
        describe(Row("", r.stack, r.layer) if (r.stack, r.layer) in whole else r) for r in map(rows.__getitem__, chosen)
    ]
    return list(dict.fromkeys(names))
