"""Shows one run, step by step: loss and gradient norm, a map of layers by steps for each probe, and what breaks
first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from ..store.layout import METRICS
from .base import Map, MissingRuns, Origin, Panel, Picture, Reference, Series
from .collection import Record, Runs
from .measures.provenance import provenance
from .pooling import COLUMNS, findings, pool, thin
from .style import AMOUNTS, INK, PARTS

UPDATE = "model_update"  # has a panel of its own
VANISHED = 1e-4  # of the largest gradient norm in the stack: below it a layer hardly learns
LINES = {"nll": "training", "held_out_nll": "held out", "loss": "training"}
COLOURS = {"encoder": PARTS[1], "decoder": PARTS[4]}
NAMED = 20  # places of a table without layers that a note can still name
SPAN = 30  # largest over smallest number from which colours are logarithmic, where the table does not say


@dataclass(frozen=True)
class LayerGrid:
    """Holds a column of a probe's table: ``values`` and ``absent`` (places, steps), what the places are called, and the
    stack and layer of each; outside of all layers only where the model has none."""

    steps: np.ndarray
    values: np.ndarray
    absent: np.ndarray
    stacks: np.ndarray
    layers: np.ndarray
    names: list[str]
    parts: list[str]  # sub-layers, or what else a row is called beside its layer
    by_layer: bool
    column: str
    unit: str
    log: bool | None

    @property
    def outputs(self) -> bool:
        """Says whether these are a few numbers of whole stacks, one each: lines rather than maps of a single row."""
        return not self.layers.any() and len({*self.stacks.tolist()}) == len(self.stacks) and len(self.steps) > 1

    @property
    def label(self) -> str:
        """Names its axis, such as ``entropy [nats]``."""
        column = self.column.replace("_", " ")
        return f"{column} [{self.unit}]" if self.column != "value" and self.unit else self.unit or column

    @property
    def lost(self) -> np.ndarray:
        return ~self.absent & ~np.isfinite(self.values)


def read(record: Record, table: str, *, by_layer: bool = True) -> LayerGrid | None:
    """Reads the main column of a table; ``by_layer`` combines the rows of a layer, where they combine; None: nothing
    recorded yet."""
    definition = record.run.table(table)
    column = definition.main
    layered = any(row.layer > 0 for row in definition.rows)
    combined = by_layer and layered and bool(definition.total)
    data = record.frame(table, [column], by="layer" if combined else None)
    if data.empty:
        return None
    steps = np.unique(data["step"].to_numpy())
    first = data.iloc[: len(data) // len(steps)]
    values, absent = (data[name].to_numpy().reshape(len(steps), -1).T for name in (column, "absent"))
    rows = np.flatnonzero(first["layer"].to_numpy() > 0) if layered else np.arange(len(first))
    stacks, layers = first["stack_name"].to_numpy().astype(str)[rows], first["layer"].to_numpy()[rows]
    names = [_name(first.iloc[row]) for row in rows]
    parts = [str(first.iloc[row].get("sublayer") or "") for row in rows]
    facts = (combined, column, definition.unit, definition.log)
    return LayerGrid(steps, values[rows], absent[rows], stacks, layers, names, parts, *facts)


def _name(row: Any) -> str:
    if row["layer"] < 1:
        return str(row.get("site") or row["stack_name"])
    stack = f" of {row['stack_name']}" if row["stack_name"] else ""
    part = f" ({row['sublayer']})" if row.get("sublayer") else ""
    return f"layer {row['layer']}{stack}{part}"


def diagnose(record: Record, columns: int = COLUMNS) -> Picture:
    """Draws loss, total gradient norm, ‖ΔF‖, and for each probe a map of layers by steps, every stack apart.

    Maps have at most ``columns`` columns. Raises MissingRuns for a run that recorded nothing yet.
    """
    lines = [_loss(record, columns), _gradient(record, columns), _update(record, columns)]
    panels = [panel for panel in lines if panel.series]
    most = 1
    notes = []
    for table in record.run.tables:
        grid = read(record, table) if table != UPDATE else None
        if grid is None:
            continue
        if grid.outputs:
            panels.append(_outputs(table, grid, columns))
            continue
        panels += _maps(table, grid, columns)
        most = max(most, math.ceil(len(grid.steps) / columns))
        if not grid.layers.any() and len(grid.names) <= NAMED:
            called = ", ".join(f"{place} {name}" for place, name in enumerate(grid.names, 1))
            notes.append(f"Places of {table.replace('_', ' ')}: {called}.")
    if not panels:
        raise MissingRuns(f"{record.name} has recorded nothing yet: come back after its first steps")
    depth = "-".join(f"{n}L" for n in record.layers if n) or "a model of your own"
    notes = [f"{record.label}, {depth}.", *notes]
    if most > 1:
        notes.append(f"A column of a map shows the largest number of up to {most} probed steps.")
    return Picture(panels, _finding(record), notes, columns=2, provenance=provenance(Runs([record])))


def _metric(record: Record, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads steps and values where it was measured; a NaN among them was."""
    if column not in record.metrics:
        return np.empty(0, int), np.empty(0)
    data = record.run.arrow(METRICS, columns=[column])
    data = data.filter(pc.is_valid(data[column]))  # pyright: ignore[reportAttributeAccessIssue]
    return data["step"].to_numpy(), data[column].to_numpy().astype(float)


def _line(record: Record, column: str, name: str, columns: int, **look: Any) -> Series | None:
    x, y = thin(*_metric(record, column), columns)
    return Series(name, x.tolist(), y.tolist(), marker="none", **look) if len(x) else None


def _lost(record: Record, *columns: str) -> int | None:
    """Finds the first step at which one of these metrics is not finite."""
    lost = [x[~np.isfinite(y)] for x, y in (_metric(record, column) for column in columns)]
    return min((int(steps[0]) for steps in lost if len(steps)), default=None)


def _breaks(record: Record, *columns: str) -> list[Reference]:
    """Marks where the run broke: the verdict's step, and the first number that is not finite."""
    verdict = record.judged
    lost = _lost(record, *columns)
    marks = [Reference(float(lost), "not finite", vertical=True)] if lost is not None else []
    if verdict and verdict.state == "diverged" and verdict.step != lost:
        marks.append(Reference(float(verdict.step), "diverged", vertical=True))
    return marks


def _loss(record: Record, columns: int) -> Panel:
    training = "nll" if "nll" in record.metrics else "loss"
    lines = [
        _line(record, training, LINES[training], columns, colour=AMOUNTS[0], dash="solid"),
        _line(record, "held_out_nll", LINES["held_out_nll"], columns, colour=INK, dash="solid"),
    ]
    unigram = (record.run.manifest.get("unigram") or {}).get("cross_entropy")
    references = [Reference(float(unigram), "unigram baseline")] if unigram else []
    references += _breaks(record, training, "held_out_nll")
    axis = "cross-entropy [nats/token]" if training == "nll" else "loss"
    return Panel("Loss", "update", axis, [line for line in lines if line is not None], references)


def _gradient(record: Record, columns: int) -> Panel:
    line = _line(record, "grad_norm_total", "total gradient norm", columns, colour=AMOUNTS[2], dash="solid")
    marks = _breaks(record, "grad_norm_total")
    return Panel("Gradient", "update", "global gradient norm (L2)", [line] if line else [], marks, log_y=True)


def _update(record: Record, columns: int) -> Panel:
    """Draws ||F(theta_t) - F(theta_0)|| of each stack's output; two unrelated outputs of a norm are sqrt(2 d) apart."""
    lines = []
    if UPDATE in record.tables:
        data = record.frame(UPDATE, ["cumulative"])
        for site, own in data.groupby("site", observed=True, sort=False):
            x, y = thin(own["step"].to_numpy(), own["cumulative"].to_numpy(), columns)
            colour = COLOURS.get(str(own["stack_name"].iloc[0]), INK)
            lines.append(Series(str(site), x.tolist(), y.tolist(), colour=colour, dash="solid", marker="none"))
    marks = [Reference(math.sqrt(2 * record.width), "√(2d)")] if record.width else []
    return Panel("Model update", "update", "‖ΔF‖ since step 0, per token", lines, marks)


def _outputs(table: str, grid: LayerGrid, columns: int) -> Panel:
    """Draws a line a stack."""
    lines, marks = [], []
    for name, stack, values in zip(
        grid.names, grid.stacks.tolist(), np.where(grid.absent, np.nan, grid.values), strict=True
    ):
        x, y = thin(grid.steps, values, columns)
        lines.append(Series(name, x.tolist(), y.tolist(), colour=COLOURS.get(stack, INK), dash="solid", marker="none"))
    if grid.lost.any():
        marks.append(Reference(float(grid.steps[grid.lost.any(0)][0]), "not finite", vertical=True))
    usual = grid.values[np.isfinite(grid.values)]
    return Panel(_title(table), "update", grid.label, lines, marks, log_y=_logarithmic(grid.log, usual))


def _title(table: str) -> str:
    return table.replace("_", " ")


def _logarithmic(log: bool | None, usual: np.ndarray) -> bool:
    """Says whether these numbers are drawn on a logarithmic scale: as their table says, or else where they span
    decades."""
    if not len(usual) or not (usual > 0).all():
        return False
    return bool(usual.max() > SPAN * usual.min()) if log is None else log


def _maps(table: str, grid: LayerGrid, columns: int) -> list[Panel]:
    """Draws a panel for each stack: one row a layer, where the table's rows combine; else one row a place."""
    panels = []
    for stack in dict.fromkeys(grid.stacks.tolist()):
        rows = grid.stacks == stack
        x, z, finding = pool(grid.steps, grid.values[rows], findings(grid.values[rows], grid.absent[rows]), columns)
        y = grid.layers[rows] if grid.by_layer else np.arange(1, rows.sum() + 1)
        axis = "layer" if grid.by_layer else ("sub-layer" if grid.layers.any() else "place")
        log = _logarithmic(grid.log, z[finding == 0])
        origin = Origin(table, stack, grid.layers[rows].tolist(), [grid.parts[row] for row in np.flatnonzero(rows)])
        heat = Map(x.tolist(), y.tolist(), z, finding, grid.label, log=log, seeds=1, origin=origin)
        panels.append(Panel(f"{_title(table)}{f', {stack}' if stack else ''}", "update", axis, map=heat))
    return panels


def _state(record: Record) -> str:
    """Says how the run stands, such as ``diverged since step 31: the held-out loss is nan`` or, of a watched run,
    ``finished at step 90``."""
    status = record.status
    if verdict := record.judged:
        return f"{verdict.state} since step {verdict.step}: {verdict.reason}"
    why = f" ({status.reason})" if status.reason else ""
    lost = _lost(record, "loss", "nll")
    broken = "" if lost is None else f", loss not finite from step {lost} on"
    return f"{status.state} at step {status.step}{why}{broken}"


def _finding(record: Record) -> str:
    """Says the verdict, the layer that breaks first, and the largest norm input, in plain words."""
    words = [_state(record), _first_break(record), _worst_input(record)]
    return "; ".join(word for word in words if word) + "."


def _first_break(record: Record) -> str:
    """Finds the first place whose gradient is not finite, or else the first that vanishes beside its stack's
    largest."""
    grid = read(record, "grad_norm") if "grad_norm" in record.tables else None
    if grid is None:
        return ""
    found = [sentence for sentence in (_lost_gradient(grid), _lost_input(record)) if sentence]
    return "; ".join(found) or _vanishing(grid)


def _lost_gradient(grid: LayerGrid) -> str:
    """Finds where the gradient was lost: backpropagation carries what is not finite downwards, so the highest place
    that has it is where it began."""
    columns = np.flatnonzero(grid.lost.any(0))
    if not len(columns):
        return ""
    rows = np.flatnonzero(grid.lost[:, columns[0]])
    step = grid.steps[columns[0]]
    if len(rows) == len(grid.names):
        return f"no layer's gradient is finite from step {step} on: it is the loss that breaks, not a layer"
    return f"the gradient of {grid.names[rows[-1]]} breaks first: not finite at step {step}" + (
        f", nor below it ({len(rows)} places)" if len(rows) > 1 else ""
    )


def _lost_input(record: Record) -> str:
    """Finds where an input was lost: the forward pass carries it upwards, so the lowest norm with such an input is
    where it began."""
    grid = read(record, "ln_input", by_layer=False) if "ln_input" in record.tables else None
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


def _worst_input(record: Record) -> str:
    grid = read(record, "ln_input", by_layer=False) if "ln_input" in record.tables else None
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
