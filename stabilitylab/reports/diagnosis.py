"""Shows one run, step by step: loss and gradient norm, and a map of layers by steps for each probe."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ..alarm.reading import recorded
from ..diagnose.audited import audited
from ..errors import UsageError, listed
from ..histograms import TABLES as HISTOGRAMS
from .base import Map, MissingRuns, Origin, Panel, Picture, Reference, Series
from .collection import Record, Runs
from .first_break import finding
from .measures.gradient_shares import gradient_shares
from .measures.histograms import ridges
from .measures.layers import above_zero
from .measures.provenance import provenance
from .pooling import COLUMNS, findings, pool, thin
from .run_grid import LayerGrid, lost_at, metric, read
from .style import AMOUNTS, INK, OUTPUTS

LAYER, PLACE = "layer", "place"  # the axes of maps with one row of a layer, and without layers
HEAD, PARAMETERS = ".head_", (".weight", ".bias")  # in the names of rows that are heads; ends of those of parameters
UPDATE = "model_update"  # has a panel of its own
LINES = {"nll": "training", "held_out_nll": "held out", "loss": "training"}
ALARMS = 3  # at most so many alarms of a run are marked
NAMED = 20  # places of a table without layers that a note can still name
RIDGED, CHOSEN = 2, 6  # places of a table of histograms that are drawn: by default, and at most if they were chosen
SPAN = 30  # largest over smallest number from which colours are logarithmic, where the table does not say


def diagnose(record: Record, columns: int = COLUMNS, places: str = "") -> Picture:
    """Draws loss, total gradient norm, ‖ΔF‖, and for each probe a map of layers by steps, every stack apart; histograms
    as ridges, of the places that moved most, or of those whose names the regular expression ``places`` matches.

    Maps have at most ``columns`` columns. Raises MissingRuns for a run that recorded nothing yet, UsageError where no
    place of a histogram matches.
    """
    looks = OutputLooks()
    lines = [_loss(record, columns), _gradient(record, columns), _update(record, columns, looks)]
    shares = gradient_shares(record, columns, looks.known)
    looks.known |= {one.label: one.colour for one in ([] if shares is None else shares.series)}
    panels = [panel for panel in (*lines, shares) if panel is not None and panel.series]
    pooled = 1
    notes = []
    rows: dict[str, list[str]] = {}  # how rows are counted -> the panels in which they are
    for table in record.run.tables:
        grid = read(record, table) if table != UPDATE and table not in HISTOGRAMS else None
        if grid is None:
            continue
        if grid.column == "nonzero_fraction":
            grid = replace(grid, column=f"{above_zero([record])}_fraction")
        if grid.outputs:
            panels.append(_outputs(table, grid, columns, looks))
            continue
        drawn_maps = _maps(table, grid, columns)
        panels += drawn_maps
        for stack, panel in zip(dict.fromkeys(grid.stacks.tolist()), drawn_maps, strict=True):
            if panel.y not in (LAYER, PLACE):
                title = f"{_title(table)} ({stack})" if stack else _title(table)
                rows.setdefault(_rows_of(grid, np.flatnonzero(grid.stacks == stack)), []).append(title)
        pooled = max(pooled, math.ceil(len(grid.steps) / columns))
        if not grid.layers.any() and len(grid.names) <= NAMED:
            called = ", ".join(f"{place} {name}" for place, name in enumerate(grid.names, 1))
            notes.append(f"Places of {table.replace('_', ' ')}: {called}.")
    notes += [f"Rows of {', '.join(titles)}: {words}." for words, titles in rows.items()]
    kept = [table for table in HISTOGRAMS if table in record.run.tables]
    most = CHOSEN if places else RIDGED
    drawn = [one for table in kept for one in ridges(record, table, most=most, chosen=places)]
    if places and kept and not drawn:
        raise UsageError(
            f"no place with a histogram in {record.name} matches {places!r}: see Run.table('{kept[0]}').rows."
        )
    if places and not kept:
        notes.append(f"{record.name} has no histograms to draw: record them with --probes default,histograms.")
    panels += [one.panel for one in drawn]
    notes += [note for one in drawn for note in one.notes("")]
    if not panels:
        raise MissingRuns(f"{record.name} has recorded nothing yet: come back after its first steps")
    notes = [f"{record.label}, {record.layers_text or 'a model of your own'}.", *notes]
    if pooled > 1:
        notes.append(f"A column of a map shows the largest number of up to {pooled} probed steps.")
    if checked := audited(record.run.manifest):
        notes.append(f"Checked at the first row: {'; '.join(checked)}.")
    return Picture(panels, finding(record), notes, columns=2, provenance=provenance(Runs([record])))


class OutputLooks:
    """Gives each output a colour of its own, the same in all panels. ``known``: name -> colour."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._own: list[str] = []  # names with a colour of OUTPUTS; from the fourth on they are dashed

    def __call__(self, name: str) -> dict[str, Any]:
        if name not in self.known:
            self.known[name] = OUTPUTS[len(self._own) % len(OUTPUTS)]
            self._own.append(name)
        return {"colour": self.known[name], "dash": "dashed" if name in self._own[len(OUTPUTS) :] else "solid"}


def _line(record: Record, column: str, name: str, columns: int, **look: Any) -> Series | None:
    x, y = thin(*metric(record, column), columns)
    return Series(name, x.tolist(), y.tolist(), marker="none", **look) if len(x) else None


def _breaks(record: Record, *columns: str) -> list[Reference]:
    """Marks where the run broke: the verdict's step, and the first number that is not finite."""
    verdict = record.judged
    lost = lost_at(record, *columns)
    marks = [Reference(float(lost), "not finite", vertical=True)] if lost is not None else []
    if verdict and verdict.state == "diverged" and verdict.step != lost:
        marks.append(Reference(float(verdict.step), "diverged", vertical=True))
    return marks


def _alarms(record: Record) -> list[Reference]:
    """Marks the first alarms that were raised while it was trained."""
    steps = [own["step"] for own in recorded(record.run.manifest) if isinstance(own.get("step"), int)]
    return [Reference(float(step), "alarm", vertical=True) for step in steps[:ALARMS]]


def _loss(record: Record, columns: int) -> Panel:
    training = "nll" if "nll" in record.metrics else "loss"
    lines = [
        _line(record, training, LINES[training], columns, colour=AMOUNTS[0], dash="solid"),
        _line(record, "held_out_nll", LINES["held_out_nll"], columns, colour=INK, dash="solid"),
    ]
    unigram = (record.run.manifest.get("unigram") or {}).get("cross_entropy")
    references = [Reference(float(unigram), "unigram baseline")] if unigram else []
    references += _breaks(record, training, "held_out_nll")
    references += _alarms(record)
    axis = "cross-entropy [nats/token]" if training == "nll" else "loss"
    return Panel("Loss", "step", axis, [line for line in lines if line is not None], references)


def _gradient(record: Record, columns: int) -> Panel:
    line = _line(record, "grad_norm_total", "total gradient norm", columns, colour=AMOUNTS[2], dash="solid")
    marks = _breaks(record, "grad_norm_total")
    return Panel("Gradient", "step", "global gradient norm (L2)", [line] if line else [], marks, log_y=True)


def _update(record: Record, columns: int, looks: OutputLooks) -> Panel:
    """Draws ||F(theta_t) - F(theta_0)|| of each stack's output; two unrelated outputs of a norm are sqrt(2 d) apart."""
    lines = []
    if UPDATE in record.tables:
        data = record.frame(UPDATE, ["cumulative"])
        for site, own in data.groupby("site", observed=True, sort=False):
            x, y = thin(own["step"].to_numpy(), own["cumulative"].to_numpy(), columns)
            lines.append(Series(str(site), x.tolist(), y.tolist(), marker="none", **looks(str(site))))
    marks = [Reference(math.sqrt(2 * record.width), "√(2d)")] if record.width else []
    return Panel("Model update", "step", "‖ΔF‖ since step 0, per token", lines, marks)


def _outputs(table: str, grid: LayerGrid, columns: int, looks: OutputLooks) -> Panel:
    """Draw one line per output."""
    lines, marks = [], []
    for name, values in zip(grid.names, np.where(grid.absent, np.nan, grid.values), strict=True):
        x, y = thin(grid.steps, values, columns)
        lines.append(Series(name, x.tolist(), y.tolist(), marker="none", **looks(name)))
    if grid.lost.any():
        marks.append(Reference(float(grid.steps[grid.lost.any(0)][0]), "not finite", vertical=True))
    usual = grid.values[np.isfinite(grid.values)]
    return Panel(_title(table), "step", grid.label, lines, marks, log_y=logarithmic(grid.log, usual))


def _rows_of(grid: LayerGrid, rows: np.ndarray) -> str:
    """Return in words which row of a map is which sub-layer or parameter."""
    layers = [(layer, [*own]) for layer, own in groupby(rows.tolist(), lambda row: int(grid.layers[row]))]
    parts = [_parts_of(grid, own) for _, own in layers]
    if len({tuple(own) for own in parts}) == 1:
        return f"{len(parts[0])} of each layer, from the lowest layer up: {listed(parts[0], NAMED)}"
    ends = np.cumsum([len(own) for own in parts]).tolist()
    starts = [end - len(own) + 1 for end, own in zip(ends, parts, strict=True)]
    ranges = [
        f"{start}{f' to {end}' if end > start else ''} in layer {layer}"
        for start, end, (layer, _) in zip(starts, ends, layers, strict=True)
    ]
    return listed(ranges, NAMED)


def _parts_of(grid: LayerGrid, rows: list[int]) -> list[str]:
    """Return the sub-layers of the rows of a layer; if several rows have one, what follows it in their names too."""
    parts = [grid.parts[row] for row in rows]
    if len({*parts}) == len(parts):
        return parts
    sites = [grid.sites[row] for row in rows]
    return [site[max(0, site.find(f".{part}.")) :].lstrip(".") for site, part in zip(sites, parts, strict=True)]


def _title(table: str) -> str:
    return table.replace("_", " ")


def logarithmic(log: bool | None, usual: np.ndarray) -> bool:
    """True if these numbers are drawn on a logarithmic scale: if all are positive and their table says so, or, if the
    table says nothing, if they span more than a factor of SPAN."""
    if not len(usual) or not (usual > 0).all():
        return False
    return bool(usual.max() > SPAN * usual.min()) if log is None else log


def _rows_are(grid: LayerGrid, rows: np.ndarray) -> str:
    """Return the name of the axis of a map with several rows of a layer: what its rows are."""
    own = [(int(grid.layers[row]), grid.parts[row]) for row in rows]
    if any(HEAD in part for _, part in own):
        return "head" if all(HEAD in part for _, part in own) else "module or head"
    if len({*own}) == len(own) and all(part for _, part in own):
        return "sub-layer"
    return "parameter" if any(grid.sites[row].endswith(PARAMETERS) for row in rows) else "module"


def _maps(table: str, grid: LayerGrid, columns: int) -> list[Panel]:
    """Draws a panel for each stack: one row a layer, where the table has one row of each or its rows combine; else one
    row a place."""
    panels = []
    for stack in dict.fromkeys(grid.stacks.tolist()):
        rows = grid.stacks == stack
        marks = findings(grid.values[rows], grid.absent[rows], grid.missing[rows])
        x, z, finding = pool(grid.steps, grid.values[rows], marks, columns)
        by_layer = grid.by_layer or bool(rows.any() and (np.diff(grid.layers[rows], prepend=0) > 0).all())
        y = grid.layers[rows] if by_layer else np.arange(1, rows.sum() + 1)
        several = _rows_are(grid, np.flatnonzero(rows)) if grid.layers.any() else PLACE
        axis = LAYER if by_layer else several
        log = logarithmic(grid.log, z[finding == 0])
        origin = Origin(table, stack, grid.layers[rows].tolist(), [grid.parts[row] for row in np.flatnonzero(rows)])
        heat = Map(x.tolist(), y.tolist(), z, finding, grid.label, log=log, seeds=1, origin=origin)
        panels.append(Panel(f"{_title(table)}{f', {stack}' if stack else ''}", "step", axis, map=heat))
    return panels
