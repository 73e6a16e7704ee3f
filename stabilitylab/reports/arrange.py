"""Arranges panels: the series of the main picture and of the controls, the scales that panels share, and the looks of
lines of one colour."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from . import style
from .base import Panel, Picture, Series

__all__ = ["alike", "apart"]

MARGIN = 0.05  # share of a shared axis, beyond the outermost number


def apart(panels: Iterable[Panel], shown: Collection[str]) -> tuple[list[Panel], list[Panel]]:
    """Return (main, controls): panels with the series of the labels ``shown`` alone, and whole panels that have more.

    A series of no architecture stays in both. A panel without any of the labels ``shown`` is a main panel as it is.
    """
    main, controls = [], []
    for panel in panels:
        kept = [one for one in panel.series if not one.arch or one.arch in shown]
        if any(one.arch for one in kept) and len(kept) < len(panel.series):
            main.append(replace(panel, series=kept))
            controls.append(panel)
        else:
            main.append(panel)
    return main, controls


def signs(panels: Iterable[Panel], meanings: Mapping[str, str]) -> list[str]:
    """Return the meanings of the signs that stand in at least one cell of these maps."""
    text = [cell for panel in panels if panel.map and panel.map.text is not None for cell in np.ravel(panel.map.text)]
    return [meaning for sign, meaning in meanings.items() if any(sign in str(cell) for cell in text)]


def alike(panels: Iterable[Panel]) -> list[Panel]:
    """Gives panels with the same y axis the same limits, so that they can be compared."""
    found = list(panels)
    axes = [(panel.y, panel.log_y) if panel.map is None else None for panel in found]
    for axis in {*axes} - {None}:
        own = [panel for panel, other in zip(found, axes, strict=True) if other == axis]
        if len(own) > 1 and (limits := _limits(own, log=own[0].log_y)):
            found = [
                replace(panel, limits=limits) if other == axis else panel
                for panel, other in zip(found, axes, strict=True)
            ]
    return found


def _limits(panels: Sequence[Panel], *, log: bool) -> tuple[float, float] | None:
    lists = [one for panel in panels for line in panel.series if not line.right for one in _values(line)]
    lines = [np.array([line.value for panel in panels for line in panel.references if not line.vertical], float)]
    values = np.concatenate([*lists, *lines])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values) or values.min() == values.max():
        return None
    low, high = (np.log(values.min()), np.log(values.max())) if log else (values.min(), values.max())
    low, high = low - MARGIN * (high - low), high + MARGIN * (high - low)
    return (float(np.exp(low)), float(np.exp(high))) if log else (float(low), float(high))


def _values(line: Series) -> list[np.ndarray]:
    return [np.asarray(line.y, float), *(line.band or ())]


Look = tuple[str, str, str]  # colour, dash, marker


def distinct(picture: Picture) -> Picture:
    """Return the picture with a different look for each label of a panel.

    If two architectures have one colour, their lines without markers get a few, each those of its architecture. If
    labels still have one colour, dash and marker, the later ones get another dash. Other lines stay as they are.
    """
    alike = {
        label
        for labels in _sharing(picture, lambda one: style.style(_label(one)).colour)
        if len({style.style(label).marker for label in labels}) > 1
        for label in labels
    }
    picture = _changed(picture, alike, _with_markers)
    for labels in _sharing(picture, _look):
        for label in labels[1:]:
            lines = [one for panel in picture.whole.panels for one in panel.series]
            taken = {_look(one) for one in lines if _label(one) not in ("", label)}
            picture = _changed(picture, {label}, lambda one, taken=taken: _with_free_dash(one, taken))
    return picture


def _sharing(picture: Picture, of: Callable[[Series], Hashable]) -> list[list[str]]:
    """Return lists of the labels whose lines share something in one panel."""
    found = []
    for panel in picture.whole.panels:
        labels: dict[Hashable, dict[str, None]] = {}
        for one in panel.series:
            if _label(one) and not one.faint:
                labels.setdefault(of(one), {})[_label(one)] = None
        found += [[*own] for own in labels.values() if len(own) > 1]
    return found


def _label(one: Series) -> str:
    """Return the label that gives a line its look; "" for points, and for a line with a colour of its own."""
    return "" if one.colour or one.kind != "line" else one.arch or one.label


def _look(one: Series) -> Look:
    own = style.style(_label(one))
    return own.colour, one.dash or own.dash, one.marker or own.marker


def _with_markers(one: Series) -> Series:
    return replace(one, marker="") if one.marker == "none" and not one.faint else one


def _with_free_dash(one: Series, taken: Collection[Look]) -> Series:
    """Return the line with a dash that makes a look that is not taken; a dash with a meaning stays."""
    if one.dash and one.detail:
        return one
    dashes = (one, *(replace(one, dash=dash) for dash in style.DASHES))
    return next((other for other in dashes if _look(other) not in taken), one)


def _changed(picture: Picture, labels: Collection[str], change: Callable[[Series], Series]) -> Picture:
    """Return the picture with the lines of these labels changed."""

    def own(panels: Sequence[Panel]) -> list[Panel]:
        return [
            replace(panel, series=[change(one) if _label(one) in labels else one for one in panel.series])
            for panel in panels
        ]

    return replace(picture, panels=own(picture.panels), controls=own(picture.controls)) if labels else picture


def smoothed(line: Series, window: int) -> list[Series]:
    """Return the raw line, faint, and its centred mean over ``window`` points (fewer at the ends). A line of at most
    ``window`` points stays as it is."""
    y = np.asarray(line.y, float)
    if len(y) <= window:
        return [line]
    ones, width = np.ones(window), "same"
    mean = np.convolve(y, ones, width) / np.convolve(np.ones(len(y)), ones, width)
    raw = replace(line, detail=f"{line.detail}, raw" if line.detail else "raw", low=None, high=None, faint=True)
    return [raw, replace(line, y=mean.tolist(), low=None, high=None, marker="none", detail=f"mean of {window} updates")]
