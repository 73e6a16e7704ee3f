"""Pictures on the screen: each panel as the data of a plotly plot, small enough to be embedded in a page."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from .. import style
from ..base import FINDINGS, Map, Origin, Panel, Picture, Series
from ..pooling import COLUMNS, pool, telling

DASHES = {"solid": "solid", "dashed": "dash", "dotted": "dot", "dashdot": "dashdot"}
MARKERS = {
    "o": "circle", "v": "triangle-down", "^": "triangle-up", "s": "square", "D": "diamond", "P": "cross", "X": "x",
    "h": "hexagon", "p": "pentagon", "*": "star", "d": "diamond-tall", "<": "triangle-left", ">": "triangle-right",
    "none": "circle",
}  # fmt: skip
DIGITS = 5  # significant digits of the embedded numbers
# The code of a heat map's cell: no such cell, a finding, or FIRST + its place among LEVELS steps from low to high.
BLANK, FIRST, LEVELS = 0, 1 + max(FINDINGS), 1 << 14


def plots(picture: Picture, columns: int = COLUMNS) -> list[dict[str, Any]]:
    """Return one JSON object for each panel. Maps have at most ``columns`` columns and lines about as many points: see
    ``thinned``. Numbers that are not finite become null.
    """
    return [_plot(panel, columns) for panel in picture.panels]


def _plot(panel: Panel, columns: int) -> dict[str, Any]:
    left = [one for one in panel.series if not one.right]
    return {
        "title": panel.title,
        "x": {"title": panel.x, "log": bool(panel.log_x), "ticks": numbers(panel.ticks), **_names(panel.map, "x")},
        "y": {"title": panel.y, "log": bool(panel.log_y), **_names(panel.map, "y"), **_limits(panel)},
        "right": {"title": panel.right, "log": bool(panel.log_right)} if len(left) < len(panel.series) else None,
        "traces": [_trace(one, columns) for one in panel.series],
        "references": [
            {"value": _number(float(line.value)), "label": line.label, "vertical": line.vertical}
            for line in panel.references
        ],
        "map": _map(panel.map, columns) if panel.map is not None else None,
    }


def _limits(panel: Panel) -> dict[str, Any]:
    """The ends of a left axis, if panels share them."""
    return {"limits": numbers(panel.limits)} if panel.limits else {}


def switchable(panel: Panel) -> bool:
    """True if the left axis, or the colours of a map, can be logarithmic: they are, or the numbers allow it.

    Every drawn number of a map must be positive. On an axis none may be negative, and one must be positive.
    """
    if panel.map is not None:
        shown = panel.map.z[(panel.map.finding == 0) & np.isfinite(panel.map.z)]
        return panel.map.log or bool(len(shown) and (shown > 0).all())
    left = [np.asarray(one.y, float) if one.band is None else one.band[0] for one in panel.series if not one.right]
    shown = np.concatenate([np.empty(0), *left])
    shown = shown[np.isfinite(shown)]
    return panel.log_y or bool((shown >= 0).all() and (shown > 0).any())


def key(one: Series) -> str:
    """Name what a toggle of the figure turns on and off: the architecture, or the series if it has none."""
    return style.title(one.arch) if one.arch else one.label


def look(one: Series) -> dict[str, Any]:
    """Colour and that of the marker's inside as #rrggbb, plotly's dash and symbol, and whether there are markers."""
    found = style.style(one.arch or one.label)
    return {
        "colour": to_hex(one.colour or found.colour),
        "dash": DASHES[one.dash or found.dash],
        "symbol": MARKERS.get(one.marker or found.marker, "circle"),
        "face": to_hex(one.colour or found.face),
        "marked": one.marker != "none",
    }


def _trace(one: Series, columns: int) -> dict[str, Any]:
    keep = thinned(one, columns)
    band = zip(("low", "high"), one.band, strict=True) if one.band else ()
    counts = one.counts[keep]
    return {
        **{axis: numbers(np.asarray(getattr(one, axis), float)[keep]) for axis in ("x", "y")},
        **{end: numbers(values[keep]) for end, values in band},
        **look(one),
        "name": one.name,
        "key": key(one),
        "kind": one.kind,
        "right": one.right,
        **({"faint": True} if one.faint else {}),
        "seeds": int(counts[0]) if len({*counts.tolist()}) == 1 else counts.tolist(),
    }


def thinned(one: Series, most: int) -> np.ndarray:
    """Places of the points that are drawn: all, or of a longer line about ``most`` that tell what it does, and what
    its band does where it has one."""
    y = np.asarray(one.y, float)
    if one.kind != "line" or len(y) <= most:
        return np.arange(len(y))
    low, high = (np.where(np.isfinite(end), end, y) for end in one.band or (y, y))
    return telling(y, low, high, max(most // 5, 1))


def _names(heat: Map | None, axis: str) -> dict[str, Any]:
    """The named rows or columns of a table, as ticks."""
    names = getattr(heat, f"{axis}_names") if heat is not None else ()
    return {"ticks": numbers(getattr(heat, axis)), "names": list(names)} if names else {}


def _map(heat: Map, columns: int) -> dict[str, Any]:
    whole = max(columns, len(heat.x_names))  # columns with names are never pooled
    x, z, finding = pool(np.asarray(heat.x, float), np.asarray(heat.z, float), np.asarray(heat.finding), whole)
    usual = (finding == 0) & np.isfinite(z)
    if heat.log:
        usual &= z > 0
    values = np.log10(z, where=usual, out=np.zeros(z.shape)) if heat.log else np.where(usual, z, 0.0)
    low, high = (float(values[usual].min()), float(values[usual].max())) if usual.any() else (0.0, 1.0)
    if heat.colours:  # a pooled cell shows one of its numbers
        low, high = map(math.log10, heat.colours) if heat.log else heat.colours
    span = high - low or 1.0
    codes = np.where(usual, FIRST + np.round((values - low) / span * (LEVELS - 1)), finding).astype("<u2")
    return {
        "x": numbers(x),
        "y": numbers(heat.y),
        "cells": packed(codes),
        "low": low,
        "span": span,
        "log": bool(heat.log),  # a figure may have taken it from an array
        "unit": heat.unit,
        "text": heat.text.tolist() if heat.text is not None else None,
        **({"square": True} if heat.square else {}),
        **({"centre": heat.centre} if heat.centre is not None else {}),
        "findings": [name for kind, name in FINDINGS.items() if (finding == kind).any()],
        **({"origin": _origin(heat.origin)} if heat.origin else {}),
    }


def _origin(origin: Origin) -> dict[str, Any]:
    """Table, stack and layers of a map's rows; sub-layers as places in a list of the different ones."""
    names = list(dict.fromkeys(origin.parts))
    parts = {"names": names, "parts": [names.index(part) for part in origin.parts]} if any(names) else {}
    return {"table": origin.table, "stack": origin.stack, "layers": numbers(origin.layers), **parts}


def packed(codes: np.ndarray) -> str:
    """Pack codes row by row: differences modulo 2^16, all low bytes before all high bytes, deflated, in base 64."""
    steps = np.diff(codes.ravel(), prepend=np.uint16(0)).astype("<u2")
    planes = steps.view(np.uint8).reshape(-1, 2).T
    return base64.b64encode(zlib.compress(np.ascontiguousarray(planes).tobytes(), 9)).decode()


def numbers(values: Iterable[float] | Sequence[float]) -> list[float | int | None]:
    """Round numbers for JSON: five significant digits, whole numbers as integers, None for what is not finite."""
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")
