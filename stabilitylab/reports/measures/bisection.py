"""Draws a bisection: error against depth in both passes, the limit of the control, and the first place over it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...bisect import Bisection, PlaceGap
from ..base import Panel, Reference, Series
from ..style import GREY, INK

PASSES = {"forward": "forward pass", "backward": "backward pass, gradients at the same places"}
TICKS = 10  # layers that have a tick, at most
FED = "#31688e"  # no colour of an architecture


def error_panels(found: Bisection, pair: str = "") -> Iterator[Panel]:
    """Yield a panel for each pass: the error at each place over its depth, the limit times the control, and the error
    of a module that is fed, if modules were. ``pair``: the names of both implementations, for the title."""
    depth, axis, ticks = _depths([place for place in found.places if place.phase == "forward"])
    limit = f"{found.limit:g} times the control"
    for phase, title in PASSES.items():
        places = sorted((p for p in found.places if p.phase == phase and p.name in depth), key=lambda p: depth[p.name])
        if not places:
            continue
        at = [depth[place.name] for place in places]
        series = [
            _line("error by the sums", at, [place.error for place in places], INK),
            _line(limit, at, [found.limit * place.control for place in places], GREY),
        ]
        fed = [place for place in found.fed if place.name in depth and place.error > 0] if phase == "forward" else []
        if fed:
            at = [depth[place.name] for place in fed]
            series.append(_line("error of a module that is fed", at, [place.error for place in fed], FED, crosses=True))
        first = found.first
        marked = first is not None and first.phase == phase and first.name in depth
        marks = [Reference(depth[first.name], f"first: {first.name}", vertical=True)] if first and marked else []
        yield Panel(
            f"{pair}: {title}" if pair else title, axis, "relative error", series, marks, log_y=True, ticks=ticks
        )


def _line(label: str, x: Sequence[float], values: Sequence[float], colour: str, crosses: bool = False) -> Series:
    """Return a line, or crosses, over what a logarithmic axis can show: neither 0 nor inf."""
    y = [value if 0 < value < math.inf else math.nan for value in values]
    look = {"kind": "crosses", "marker": "x"} if crosses else {"marker": "none", "dash": "solid"}
    return Series(label, x, y, colour=colour, seeds=0, **look)  # pyright: ignore[reportArgumentType]


def _depths(places: Sequence[PlaceGap]) -> tuple[dict[str, float], str, Sequence[int]]:
    """Return the depth of each place, the name of its axis, and the layers that have a tick: the places of a layer lie
    between its number and the next. Layers of several stacks stand one behind the other, as their first places do."""
    groups: dict[tuple[str, int], list[str]] = {}
    for place in places:
        if place.layer:
            groups.setdefault((place.stack, place.layer), []).append(place.name)
    at = {key: number for number, key in enumerate(groups, start=1)}
    found: dict[str, float] = {}
    passed, behind = 0, dict[int, int]()
    for place in places:
        if place.layer:
            key = (place.stack, place.layer)
            passed = max(passed, at[key])
            found[place.name] = at[key] + groups[key].index(place.name) / len(groups[key])
        else:  # before the first layer, or behind those so far
            behind[passed] = behind.get(passed, -1) + 1
            found[place.name] = passed + 1 + behind[passed] / 10 if passed else 0.0
    stacks = list(dict.fromkeys(stack for stack, _ in groups))
    every = max(1, math.ceil(len(at) / TICKS))
    axis = f"layer, of {', then '.join(stacks)}" if len(stacks) > 1 else "layer"
    return found, axis, range(every, len(at) + 1, every)
