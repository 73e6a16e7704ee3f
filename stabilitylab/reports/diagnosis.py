"""One run, step by step: loss and gradient norm, and a map of layers by steps for each probe."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .base import Map, MissingRuns, Panel, Picture, Reference, Series
from .collection import Record
from .pooling import COLUMNS, findings, pool
from .style import GREY, INK

MAIN = {  # table -> its main column, and whether its colours are logarithmic
    "grad_norm": ("value", True),
    "activation_grad_norm": ("value", True),
    "ln_input": ("value", True),
    "update_ratio": ("value", True),
    "cosine_similarity": ("raw", False),
    "activation_sparsity": ("nonzero_fraction", False),
    "branch_variance": ("branch", True),
}
VANISHED = 1e-4  # of the median layer's gradient norm: below it a layer hardly learns
LINES = {"nll": "training", "held_out_nll": "held out", "loss": "training, smoothed"}


def diagnose(record: Record, columns: int = COLUMNS) -> Picture:
    """Loss, total gradient norm, and for each probe a map of layers by steps, both stacks apart.

    Raises MissingRuns for a run that recorded nothing yet.
    """
    if record.metrics.empty and not record.tables:
        raise MissingRuns(f"{record.name} has recorded nothing yet")
    panels = [panel for panel in (_loss(record), _gradient(record)) if panel.series]
    for table in (*(name for name in MAIN if name in record.tables), *sorted(record.tables - MAIN.keys() - SKIPPED)):
        panels += _maps(record, table, columns)
    notes = [f"{record.label}, {', '.join(f'{n} layers' for n in record.layers if n) or 'a model of your own'}."]
    return Picture(panels, _finding(record), notes, columns=2)


SKIPPED = {"model_update", "update_rate", "perturbation", "ln_jacobian", "theorem43", "theorem42", "lemma41"}


def _line(record: Record, column: str, name: str, **look: Any) -> Series | None:
    data = record.metrics
    if column not in data:
        return None
    data = data[["step", column]].dropna()
    return Series(name, data["step"].tolist(), data[column].tolist(), marker="none", **look) if len(data) else None


def _loss(record: Record) -> Panel:
    training = "nll" if "nll" in record.metrics else "loss"
    lines = [
        _line(record, training, LINES[training], colour=GREY, dash="solid"),
        _line(record, "held_out_nll", LINES["held_out_nll"], colour="#0072B2", dash="solid"),
    ]
    unigram = (record.run.manifest.get("unigram") or {}).get("cross_entropy")
    references = [Reference(float(unigram), "unigram baseline")] if unigram else []
    return Panel("Loss", "update", "cross-entropy [nats/token]", [x for x in lines if x is not None], references)


def _gradient(record: Record) -> Panel:
    line = _line(record, "grad_norm_total", "total gradient norm", colour=INK, dash="solid")
    return Panel("Gradient", "update", "global gradient norm (L2)", [line] if line else [], log_y=True)


def _maps(record: Record, table: str, columns: int) -> list[Panel]:
    """A panel for each stack: one row a layer, where the table's rows combine; else one row a place."""
    definition = record.run.table(table)
    column, log = MAIN.get(table, (definition.columns[0], False))
    if column not in definition.columns:
        column = definition.columns[0]
    by = "layer" if definition.total else None
    data = record.frame(table, [column], by=by)
    if data.empty:
        return []
    steps = np.unique(data["step"].to_numpy())
    values, absent = (data[name].to_numpy().reshape(len(steps), -1).T for name in (column, "absent"))  # (places, steps)
    first = data.iloc[: len(values)]
    layers, stacks = first["layer"].to_numpy(), first["stack"].astype(str).to_numpy()
    panels = []
    for stack in dict.fromkeys(stacks.tolist()):
        rows = np.flatnonzero((stacks == stack) & (layers > 0) if (layers > 0).any() else stacks == stack)
        if not len(rows):
            continue
        places = layers[rows] if by else np.arange(1, len(rows) + 1)
        found = findings(values[rows], absent[rows])
        x, z, finding = pool(steps, values[rows], found, columns)
        usable = log and bool((z[finding == 0] > 0).all())
        title = f"{table.replace('_', ' ')}{f', {stack}' if stack else ''}"
        heat = Map(x.tolist(), places.tolist(), z, finding, definition.unit or column, log=usable)
        panels.append(Panel(title, "update", "layer" if by else "place", map=heat))
    return panels


def _finding(record: Record) -> str:
    """The verdict, the layer that breaks first, and the largest LayerNorm input, in plain words."""
    status = record.status
    verdict = status.facts.get("verdict") or {}
    words = [f"{verdict['state']} since step {verdict['step']}: {verdict['reason']}" if verdict else f"{status.state}"]
    words += [sentence for sentence in (_first_break(record), _worst_input(record)) if sentence]
    return "; ".join(words) + "."


def _first_break(record: Record) -> str:
    """The first layer whose gradient is not finite, or else the weakest one at the last probed step."""
    if "grad_norm" not in record.tables:
        return ""
    data = record.frame("grad_norm", ["value"], by="layer")
    data = data[(data["layer"] > 0) & ~data["absent"]]
    lost = data[~np.isfinite(data["value"])]
    if len(lost):
        row = lost.iloc[0]
        return f"the first gradient that is not finite is that of {_place(row)}, at step {row['step']}"
    last = data[data["step"] == data["step"].max()]
    middle = float(last["value"].median()) if len(last) else math.nan
    if not middle > 0:
        return ""
    row = last.loc[last["value"].idxmin()]
    if row["value"] < VANISHED * middle:
        return (
            f"the gradient of {_place(row)} has vanished: {row['value']:.1e} at step {row['step']}, "
            f"where the median layer has {middle:.1e}"
        )
    return (
        f"no layer's gradient vanishes (the weakest, of {_place(row)}, has {row['value'] / middle:.2g} of the median)"
    )


def _worst_input(record: Record) -> str:
    if "ln_input" not in record.tables or not record.width:
        return ""
    last = record.at("ln_input", None, ["value"])
    last = last[np.isfinite(last["value"]) & (last["layer"] > 0)]
    if not len(last):
        return ""
    row = last.loc[last["value"].idxmax()]
    size = row["value"] / math.sqrt(record.width)
    return f"the largest LayerNorm input stands at {_place(row)} ({size:.2g} √d)"


def _place(row: Any) -> str:
    return " ".join(str(part) for part in (row["stack"], row["layer"], row.get("sublayer", "")) if str(part))
