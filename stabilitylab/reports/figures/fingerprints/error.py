"""The error of a run against another, by its fingerprints, along the depth of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ....bisect import Bisection, PlaceGap
from ....bisect.prints import RunPrints
from ....bisect.stored import common_steps, of_prints
from ....errors import UsageError
from ...base import Figure, MissingRuns, Panel, Picture, Reference, Series, figure
from ...collection import Record, Runs
from ...measures.provenance import provenance
from ...style import GREY, INK

MOST = 2  # runs that are held against the first
TABLE = "fingerprint"
COMMAND = "stabilitylab probe --probes default,fingerprint"
PASSES = {"forward": "forward pass", "backward": "backward pass, gradients at the same places"}


@figure("fingerprints:error", title="Where two runs part", source="stabilitylab bisect")
class FingerprintError(Figure):
    """||x_B - x_A|| / ||x_A|| at each place of the model, estimated by sums with random signs, for the first row that
    two runs have in common and in which they differ: the first run with fingerprints against each of the next. The
    grey line is three times the rounding of the dtype, above which an added error is a difference in what is computed.
    No paper draws this: ours."""

    def picture(self, runs: Runs) -> Picture:
        own = runs.where(lambda run: TABLE in run.run.tables)
        if len(own) < 2:
            raise MissingRuns("fewer than two runs have recorded fingerprints", COMMAND)
        first, *others = own
        found = {run.name: answer for run in others[:MOST] if (answer := _answer(first, run)) is not None}
        if not found:
            raise MissingRuns(f"no run has a row of fingerprints with the places of {first.name}", COMMAND)
        panels = [
            panel
            for name, answer in found.items()
            for phase, title in PASSES.items()
            if (panel := _panel(answer, phase, f"{name} against {first.name}: {title}")) is not None
        ]
        notes = [f"{name}, step {answer.step}: {answer.sentences()[0]}" for name, answer in found.items()]
        if left := len(own) - 1 - len(found):
            notes.append(f"Left out: {left} more run{'s' * (left > 1)} with fingerprints.")
        shown = own.where(lambda run: run.name in found or run.name == first.name)
        finding = _finding(first.name, found)
        return Picture(panels, finding, notes, columns=1, provenance=provenance(shown))


def _answer(first: Record, other: Record) -> Bisection | None:
    """Bisect two runs at their first common row in which they differ, else at the last one; None without such a row."""
    try:
        steps = common_steps((first.run, other.run))
        prints = RunPrints(first.run), RunPrints(other.run)
        for step in steps:
            found = of_prints([one.at(step) for one in prints])
            if found.verdict != "identical" or step == steps[-1]:
                return found
    except UsageError:
        pass
    return None


def _finding(first: str, found: dict[str, Bisection]) -> str:
    parted = [f"{name} computes something else in {answer.where}" for name, answer in found.items() if answer.exit_code]
    alike = [name for name, answer in found.items() if not answer.exit_code]
    if alike:
        parted.append(f"{' and '.join(alike)} differ{'s' * (len(alike) == 1)} by no more than rounding")
    return f"Against {first}, {'; '.join(parted)}: by an assumed rounding, without a control."


def _panel(found: Bisection, phase: str, title: str) -> Panel | None:
    """Return the panel of a pass, over the depth of the places in the forward pass; None if nothing differs in it."""
    depth, axis = _depths([place for place in found.places if place.phase == "forward"])
    places = sorted((p for p in found.places if p.phase == phase and p.name in depth), key=lambda p: depth[p.name])
    if not any(place.error > 0 for place in places):
        return None
    at = [depth[place.name] for place in places]
    series = [
        Series("error", at, _shown(place.error for place in places), colour=INK),
        Series(f"{found.limit:g} times the rounding", at, [found.limit * p.control for p in places], colour=GREY),
    ]
    first = found.first
    marked = first is not None and first.phase == phase and first.name in depth
    marks = [Reference(depth[first.name], f"first: {first.name}", vertical=True)] if first and marked else []
    return Panel(title, axis, "relative error", series, marks, log_y=True)


def _depths(places: Sequence[PlaceGap]) -> tuple[dict[str, float], str]:
    """Return the depth of each place, and what it is: the places of a layer lie between its number and the next. Layers
    of several stacks stand one behind the other, as their first places do."""
    groups: dict[tuple[str, int], list[str]] = {}
    for place in places:
        groups.setdefault((place.stack if place.layer else "", place.layer or 0), []).append(place.name)
    layers = [key for key in groups if key[1]]
    at = {key: number for number, key in enumerate(layers, start=1)}
    found: dict[str, float] = {}
    passed, behind = 0, dict[int, int]()
    for place in places:
        key = (place.stack, place.layer or 0)
        passed = max(passed, at.get(key, 0))
        if place.layer:
            own = groups[key]
            found[place.name] = at[key] + own.index(place.name) / len(own)
        else:  # before the first layer, or behind those so far
            behind[passed] = behind.get(passed, -1) + 1
            found[place.name] = passed + 1 + behind[passed] / 10 if passed else 0.0
    stacks = list(dict.fromkeys(stack for stack, _ in layers))
    return found, f"layer, of {', then '.join(stacks)}" if len(stacks) > 1 else "layer"


def _shown(errors: Iterable[float]) -> list[float]:
    """Return what a logarithmic axis can show: neither 0 nor inf."""
    return [error if 0 < error < math.inf else math.nan for error in errors]
