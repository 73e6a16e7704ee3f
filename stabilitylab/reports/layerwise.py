"""What several figures have in common: the group of runs that is drawn, lines over layers, and the held-out loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..experiments import command
from . import style
from .base import MissingRuns, Panel, Series, Spread
from .collection import Record, Runs

STACKS = ("encoder", "decoder")


def largest_group(runs: Runs, tables: Sequence[str], figure: str, *free: str) -> tuple[Runs, list[str]]:
    """The richest group of comparable training runs with these tables, and notes on it and on what was left out."""
    groups = runs.where(kind="train", table=tables).groups(*free)
    if not groups:
        raise MissingRuns(f"no training run with {' and '.join(tables) or 'metrics'}", command(figure))
    first, *others = groups
    notes = [f"Drawn: {first.describe()}. Lines are means over seeds, bands their range."]
    if others:
        count = sum(map(len, others))
        notes.append(f"Not drawn: {count} run{'s' if count > 1 else ''} with other settings ({len(others)} groups).")
    return first, notes


def layer_values(record: Record, table: str, column: str, stack: str, step: int | None = None) -> dict[int, float]:
    """Layer -> value at the probed step nearest to ``step`` (None: the last); what is outside the layers left out."""
    data = record.at(table, step, [column], by="layer")
    data = data[(data["stack"] == stack) & (data["layer"] > 0)]
    return dict(zip(data["layer"].tolist(), data[column].tolist(), strict=True))


def by_layer(
    group: Runs, table: str, column: str, stack: str, *, step: int | None = None, first: int = 1, log: bool = False
) -> list[Series]:
    """One line a label: the values of a stack's layers from ``first`` on, over seeds."""
    lines = []
    for label in group.labels:
        spread = Spread(log=log)
        for record in group.where(label=label):
            values = {
                layer: x for layer, x in layer_values(record, table, column, stack, step).items() if layer >= first
            }
            spread.add([*values], [*values.values()])
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label))
    return lines


def held_out_panel(group: Runs) -> Panel:
    """Held-out cross-entropy against updates."""
    lines = []
    for label in group.labels:
        spread = Spread()
        for record in group.where(label=label):
            data = record.held_out()
            spread.add(data["step"].tolist(), data["held_out_nll"].tolist())
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label))
    return Panel("Held-out loss", "update", "cross-entropy [nats/token]", lines)


def gradient_panel(group: Runs, stack: str = "encoder") -> Panel:
    """Parameter gradient norm of each layer of a stack at the last probed step."""
    with_gradients = group.where(table="grad_norm")
    lines = by_layer(with_gradients, "grad_norm", "value", stack, log=True)
    return Panel(f"Gradient, {stack}, last probed step", f"{stack} layer", "gradient norm (L2)", lines, log_y=True)


def last_nll(record: Record) -> float:
    """Held-out cross-entropy after training; inf for a run that diverged, NaN where none was measured."""
    if record.verdict == "diverged":
        return float("inf")
    data = record.held_out()
    return float(data["held_out_nll"].iloc[-1]) if len(data) else float("nan")


def differences(first: Record, second: Record, table: str, column: str, step: int | None = None, lowest: int = 1):
    """Stack -> first minus second at each layer from ``lowest`` on that both have."""
    found = {}
    for stack in STACKS:
        one, other = (layer_values(record, table, column, stack, step) for record in (first, second))
        layers = [layer for layer in sorted(one.keys() & other.keys()) if layer >= lowest]
        found[stack] = np.array([one[layer] - other[layer] for layer in layers])
    return found
