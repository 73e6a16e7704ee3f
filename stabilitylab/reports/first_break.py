"""One run in plain words: how it stands, the layer that breaks first, and the largest norm input."""

from __future__ import annotations

import math

import numpy as np

from ..diagnose import Event
from ..diagnose.order import comes_before
from .collection import Record
from .run_grid import LayerGrid, lost_at, read

VANISHED = 1e-4  # share of the stack's largest gradient norm: a layer below it hardly learns


def _state(record: Record) -> str:
    """Write the state of a run, such as ``diverged since step 31: the held-out loss is nan`` or, of a watched run,
    ``finished at step 90``."""
    status = record.status
    if verdict := record.judged:
        return f"{verdict.state} since step {verdict.step}: {verdict.reason}"
    why = f" ({status.reason})" if status.reason else ""
    lost = lost_at(record, "loss", "nll")
    broken = "" if lost is None else f", loss not finite from step {lost} on"
    return f"{status.state} at step {status.step}{why}{broken}"


SAID = ("vanishing_gradient", "non_finite", "divergence")  # kinds of first signs that other clauses describe


def finding(record: Record) -> str:
    """Write the verdict, the first sign of trouble, the layer that breaks first, and the largest norm input."""
    inputs = read(record, "ln_input", by_layer=False) if "ln_input" in record.tables else None
    words = [_state(record), _first_sign(record), _first_break(record, inputs), _worst_input(record, inputs)]
    return "; ".join(word for word in words if word) + "."


def _first_sign(record: Record) -> str:
    """Name the first sign that ``diagnose`` found; "" if there is none, or if another clause describes it."""
    first = None if record.diagnosis is None else record.diagnosis.cause.first
    if first is None or first.kind in SAID:
        return ""
    return f"first sign: {first.title} at step {first.step}"


def _first_break(record: Record, inputs: LayerGrid | None) -> str:
    """Finds the first place whose gradient is not finite, or else the first that vanishes beside its stack's
    largest."""
    grid = read(record, "grad_norm") if "grad_norm" in record.tables else None
    if grid is None:
        return ""
    found = (_lost_gradient(grid, _first_number(record), inputs), _lost_input(inputs))
    return "; ".join(filter(None, found)) or _vanishing(grid)


def _first_number(record: Record) -> Event | None:
    """Find the event of ``diagnose`` for the first number that is not finite and has a place before the loss."""
    events = () if record.diagnosis is None else record.diagnosis.events
    lost = (event for event in events if event.kind == "non_finite" and event.place is not None)
    return next((event for event in lost if comes_before(event.phase, "loss")), None)


def _lost_gradient(grid: LayerGrid, first: Event | None, inputs: LayerGrid | None) -> str:
    """Find where the gradient was lost. Backpropagation carries values that are not finite downwards, so they began at
    the highest place that has them. If all places have them, they began in the forward pass or in the loss."""
    columns = np.flatnonzero(grid.lost.any(0))
    if not len(columns):
        return ""
    rows = np.flatnonzero(grid.lost[:, columns[0]])
    step = grid.steps[columns[0]]
    if len(rows) == len(grid.names):
        all_lost = f"no layer's gradient is finite from step {step} on"
        if first is not None and first.step <= step:
            return f"{all_lost}; the first number that is not finite is at {first.where}, at step {first.step}"
        if inputs is not None and inputs.lost[:, inputs.steps <= step].any():
            return f"{all_lost}, since the forward pass breaks before"
        return f"{all_lost}: it is the loss that breaks, not a layer"
    return f"the gradient of {grid.names[rows[-1]]} breaks first: not finite at step {step}" + (
        f", nor below it ({len(rows)} places)" if len(rows) > 1 else ""
    )


def _lost_input(grid: LayerGrid | None) -> str:
    """Find the first norm with an input that is not finite: the forward pass carries it upwards, so the lowest."""
    if grid is None or not grid.lost.any():
        return ""
    columns = np.flatnonzero(grid.lost.any(0))
    row = int(np.flatnonzero(grid.lost[:, columns[0]])[0])
    return f"the first norm whose input is not finite is that of {grid.names[row]}, at step {grid.steps[columns[0]]}"


def _vanishing(grid: LayerGrid) -> str:
    usual = np.where(grid.absent, np.nan, grid.values)
    largest = np.full_like(usual, np.nan)
    still_zero = ""
    for stack in dict.fromkeys(grid.stacks.tolist()):
        rows = grid.stacks == stack
        largest[rows] = np.fmax.reduce(usual[rows], axis=0)
        if largest[rows][0, -1] == 0:
            still_zero += f"; every gradient of {stack} is exactly 0 at step {grid.steps[-1]}"
    relative = np.divide(usual, largest, out=np.full_like(usual, np.nan), where=largest > 0)
    if not np.isfinite(relative).any():
        return "every gradient is 0 or absent" if len(usual) else ""
    columns = np.flatnonzero((relative < VANISHED).any(0))
    column = int(columns[0]) if len(columns) else int(np.flatnonzero(np.isfinite(relative).any(0))[-1])
    row = int(np.nanargmin(relative[:, column]))
    stack = grid.stacks == grid.stacks[row]
    top = int(np.flatnonzero(stack)[np.nanargmax(usual[stack, column])])
    size = f"{relative[row, column]:.2g} of that of {grid.names[top]} at step {grid.steps[column]}"
    if not len(columns):
        return f"no layer's gradient vanishes beside others (the weakest, of {grid.names[row]}, is {size}){still_zero}"
    still = int((relative[:, -1] < VANISHED).sum())
    end = f"at step {grid.steps[-1]}"
    later = f", and {still} of {len(grid.names)} are that weak {end}" if still else f", but none is that weak {end}"
    return f"the gradient of {grid.names[row]} vanishes first: it is {size}{later}{still_zero}"


def _worst_input(record: Record, grid: LayerGrid | None) -> str:
    if grid is None:
        return ""
    usual = np.where(np.isfinite(grid.values) & ~grid.absent, grid.values, np.nan)
    if np.isnan(usual).all():
        return ""
    row, column = np.unravel_index(np.nanargmax(usual), usual.shape)
    scale, unit = (math.sqrt(record.width), " √d") if record.width else (1.0, "")
    sizes = (usual[row, column] / scale, float(np.nanmedian(usual[:, column])) / scale)
    return (
        f"the largest norm input stands at {grid.names[row]}, step {grid.steps[column]}: {sizes[0]:.3g}{unit}, where "
        f"the median norm has {sizes[1]:.3g}{unit}"
    )
