"""Pictures on the screen: each panel as the data and layout of a plotly plot, small enough to embed."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import style
from .base import ABSENT, NONFINITE, ZERO, Map, Panel, Picture, Reference, Series

DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
MARKERS = {
    "o": "circle", "v": "triangle-down", "^": "triangle-up", "s": "square", "D": "diamond", "P": "cross", "X": "x",
    "h": "hexagon", "p": "pentagon", "*": "star", "none": "circle",
}  # fmt: skip
MOST_MARKERS = 40  # points of a line beyond which markers would hide it
DIGITS = 5  # significant ones that are embedded
LEVELS = 65_534  # steps of a heat map's colour and hover value; 65535 marks a cell without a number
FINDINGS = {ZERO: "exactly 0", ABSENT: "no gradient", NONFINITE: "not finite"}


def plots(picture: Picture) -> list[dict[str, Any]]:
    """One JSON object a panel: title, traces, axes, references, or a map; numbers that are not finite are null."""
    return [_plot(panel) for panel in picture.panels]


def _plot(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "x": {"title": panel.x, "log": panel.log_x, "ticks": numbers(panel.ticks)},
        "y": {"title": panel.y, "log": panel.log_y},
        "right": {"title": panel.right, "log": panel.log_right} if any(one.right for one in panel.series) else None,
        "traces": [trace for one in panel.series for trace in _traces(one)],
        "references": [_reference(line) for line in panel.references],
        "map": _map(panel.map) if panel.map is not None else None,
    }


def key(one: Series) -> str:
    """What a toggle of the figure turns on and off: the architecture, or the series where it has none."""
    return style.title(one.arch) if one.arch else one.label


def _traces(one: Series) -> list[dict[str, Any]]:
    look = style.style(one.arch or one.label)
    colour, group = one.colour or look.colour, key(one)
    axis = "y2" if one.right else "y"
    symbol = "x-thin-open" if one.kind == "crosses" else MARKERS.get(one.marker or look.marker, "circle")
    if one.kind != "crosses" and not look.filled:
        symbol += "-open"
    marked = one.kind != "line" or (len(one.x) <= MOST_MARKERS and one.marker != "none")
    mode = "+".join(part for part, used in (("lines", one.kind == "line"), ("markers", marked)) if used)
    line: dict[str, Any] = {
        "x": numbers(one.x),
        "y": numbers(one.y),
        "name": one.name,
        "key": group,
        "mode": mode,
        "yaxis": axis,
        "line": {"color": colour, "width": 1.8, "dash": DASHES[one.dash or look.dash]},
        "marker": {"color": colour, "size": 9 if one.kind == "crosses" else 6, "symbol": symbol,
                   "line": {"width": 2 if one.kind == "crosses" else 1.2, "color": colour}},
        "seeds": one.seeds,
    }  # fmt: skip
    if one.low is None or one.high is None:
        return [line]
    if one.kind == "line" and len(one.x) > 1:
        x, low, high = numbers(one.x), numbers(one.low), numbers(one.high)
        band = {"x": x + x[::-1], "y": high + low[::-1], "key": group, "band": colour, "yaxis": axis, "name": one.name}
        return [band, line]
    up, down = (np.abs(np.subtract(end, one.y)) for end in (one.high, one.low))
    bars = {"array": numbers(up), "arrayminus": numbers(down), "color": colour, "width": 3, "thickness": 1}
    line["error_y"] = {"type": "data", "symmetric": False, **bars}
    return [line]


def _reference(line: Reference) -> dict[str, Any]:
    return {"value": line.value, "label": line.label, "vertical": line.vertical}


def _map(heat: Map) -> dict[str, Any]:
    """The numbers as 16-bit steps between the smallest and the largest (of the logarithm, where colours are log)."""
    usual = (heat.finding == 0) & np.isfinite(heat.z)
    if heat.log:
        usual &= heat.z > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log10(heat.z) if heat.log else heat.z
    low, high = (float(values[usual].min()), float(values[usual].max())) if usual.any() else (0.0, 1.0)
    span = high - low or 1.0
    steps = np.full(heat.z.shape, LEVELS + 1, dtype="<u2")
    steps[usual] = np.round((values[usual] - low) / span * LEVELS).astype("<u2")
    places = np.argwhere(heat.finding > 0)
    special = {
        FINDINGS[kind]: [[int(i), int(j)] for i, j in places if heat.finding[i, j] == kind]
        for kind in FINDINGS
        if (heat.finding == kind).any()
    }
    return {
        "x": numbers(heat.x),
        "y": numbers(heat.y),
        "rows": heat.z.shape[0],
        "cells": base64.b64encode(steps.tobytes()).decode(),
        "low": low,
        "span": span,
        "log": heat.log,
        "unit": heat.unit,
        "special": special,
    }


def numbers(values: Iterable[float] | Sequence[float]) -> list[float | int | None]:
    """As JSON has them: five significant digits, whole numbers as such, null for what is not finite."""
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")
