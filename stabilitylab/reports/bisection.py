"""The picture of a comparison: error against depth in both passes, the control, and the first place that is over it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..bisect import Bisection, PlaceGap
from . import style
from .style import GREY, INK

WIDTH, HEIGHT = 7.0, 2.6  # inches of a pass
MARK, FED = "#a50f15", "#31688e"  # no colours of architectures
LETTERS = 110  # of a line of the title
LOWEST = 1e-12  # share of the largest error below which an error of 0 is drawn
TITLES = {"forward": "forward", "backward": "backward (dE/dx, at the depth of x)"}


def write(found: Bisection, path: Path) -> None:
    """Draw to a file of the kind that its name says."""
    with matplotlib.rc_context():
        style.use_print_style()
        draw(found).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(found: Bisection) -> Figure:
    """Return the figure: a panel for each of the two passes, with one axis of depth."""
    depth = {place.name: at for at, place in enumerate(p for p in found.places if p.phase == "forward")}
    passes = {phase: [p for p in found.places if p.phase == phase and p.name in depth] for phase in TITLES}
    passes = {phase: places for phase, places in passes.items() if places}
    figure = Figure(figsize=(WIDTH, HEIGHT * max(1, len(passes)) + 0.7), layout="constrained")
    panels = figure.subplots(max(1, len(passes)), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (phase, places) in zip(panels, passes.items(), strict=False):
        _pass(panel, found, phase, places, depth)
    _layers(panels[-1], [place for place in found.places if place.phase == "forward"])
    figure.suptitle(textwrap.fill(found.sentences()[0], LETTERS, max_lines=3), fontsize=8, x=0.01, ha="left")
    return figure


def _pass(panel: Axes, found: Bisection, phase: str, places: Sequence[PlaceGap], depth: dict[str, int]) -> None:
    places = sorted(places, key=lambda place: depth[place.name])
    at = np.array([depth[place.name] for place in places])
    error, control = (np.array([getattr(p, name) for p in places]) for name in ("error", "control"))
    finite = np.concatenate([values[np.isfinite(values) & (values > 0)] for values in (error, control)])
    top = finite.max() if len(finite) else 1.0
    low = max(finite.min() / 3 if len(finite) else 0.1, top * LOWEST)
    panel.fill_between(at, low, np.clip(found.limit * control, low, None), color=GREY, alpha=0.25, lw=0)
    panel.plot(at, np.clip(control, low, None), color=GREY, lw=0.8)
    panel.plot(at, np.clip(np.where(np.isfinite(error), error, 3 * top), low, None), color=INK, marker=".", lw=0.8)
    labels = [("error by the sums", INK), ("control, up to the limit", GREY)]
    fed = [place for place in found.fed if place.name in depth] if phase == "forward" else []
    if fed:
        own = np.clip([place.error for place in fed], low, 3 * top)
        panel.plot([depth[place.name] for place in fed], own, color=FED, marker="x", lw=0, ms=3)
        labels.append(("error of a module that is fed", FED))
    first = found.first
    if first is not None and first.phase == phase and first.name in depth:
        panel.axvline(depth[first.name], color=MARK, lw=1.0, ls="dashed")
        labels.append((f"first: {first.name}", MARK))
    panel.set_yscale("log")
    panel.set_ylim(bottom=low)
    panel.set_ylabel("relative error")
    panel.set_title(TITLES[phase], fontsize=8)
    for number, (label, colour) in enumerate(labels):
        panel.text(1.01, 0.98 - 0.11 * number, label, color=colour, fontsize=6, transform=panel.transAxes, va="top")


def _layers(panel: Axes, places: Sequence[PlaceGap]) -> None:
    """Label the first place of each layer."""
    starts: dict[tuple[str, int], int] = {}
    for at, place in enumerate(places):
        if place.layer:
            starts.setdefault((place.stack, place.layer), at)
    most = max(1, len(starts) // 24 + 1)
    stacks = {stack for stack, _ in starts}
    shown = [(f"{stack} {layer}" if len(stacks) > 1 else f"{layer}", at) for (stack, layer), at in starts.items()]
    panel.set_xticks([at for _, at in shown[::most]], [label for label, _ in shown[::most]], fontsize=6)
    if len(stacks) > 1:
        panel.tick_params(axis="x", rotation=60)
    panel.set_xlabel("places in the order of the forward pass, by layer")
