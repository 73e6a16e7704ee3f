"""The rules of a bisection: the errors of places, the part that control or input explains, and the first place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .differences import Gap, gap
from .matching import Matched, Pair
from .prints import DIRECTIONS, Fingerprint, module_of, norm_of_sums

LIMIT = 3.0  # times the control; a larger added error is not rounding
ONE_ROUNDING = 0.29  # root mean square of a rounding to nearest, in units in the last place: 1 / sqrt(12)
GROWTH = 4.0  # calls after which the square of the roundings has doubled, in a run without a control
NO_SIGNAL = 1e-4  # of the largest gradient of a layer: a smaller one is the rounding of others, as that of key biases


@dataclass(frozen=True)
class PlaceGap:
    """The difference of two sides at one place.

    ``error``: the relative difference, with the ``standard_error`` of its estimate. ``control``: the relative
    difference in the control. ``inherited``: the part of the error that comes from the input of the module. ``added``:
    sqrt(max(0, error^2 - inherited^2)). ``factor``: ``added`` / ``control``. ``judged``: False if the two sides cannot
    be compared here, or if the value is nothing but rounding (a control of 1 or more). ``name`` and ``other``: the
    place's name in the first and in the second side.
    """

    phase: str
    name: str  # in the first
    other: str  # in the second
    stack: str
    layer: int
    sublayer: str
    error: float
    standard_error: float
    control: float
    inherited: float
    added: float
    judged: bool = True

    @property
    def factor(self) -> float:
        if not self.added:
            return 0.0
        return self.added / self.control if self.control else math.inf

    def is_over(self, limit: float) -> bool:
        return self.judged and not self.factor <= limit  # True for NaN too

    @property
    def module(self) -> str:
        return module_of(self.name)

    @property
    def blamed(self) -> str:
        """The module in which the difference at this place arises: the place's own module, or the module around it if
        data enter the module at this place. "" is the model itself."""
        return self._blamed(self.name)

    @property
    def blamed_there(self) -> str:
        """The same module by its name in the second side."""
        return self._blamed(self.other)

    def _blamed(self, name: str) -> str:
        module = module_of(name)
        return module.rpartition(".")[0] if self.enters else module

    @property
    def enters(self) -> bool:
        """True if the place is where data enter a module in this pass, so that an error here arose outside of the
        module."""
        return self.name.endswith(":out" if self.phase == "backward" else ":in")


def judged(matching: Matched, controls: Sequence[Matched], made: bool) -> tuple[PlaceGap, ...]:
    """Return all places with their errors, each pass in the order of the data.

    The control of a place is the root mean square of its differences in ``controls``, and at least one rounding of the
    coarser dtype that was in use so far; in stored runs (``made`` False), whose control may repeat them bit for bit, it
    is at least what roundings of all calls so far would add up to. What enters a module with r times the control
    leaves it with r times the control there: r c_out = (c_out / c_in) e_in is the inherited error, and c_out / c_in the
    gain. What enters a module may come from anywhere before, so that the largest r before it counts. The control of an
    update is at least what :class:`_Steps` says.
    """
    own: dict[tuple[str, str], list[float]] = {}
    for control in controls:
        for pair in control.pairs:
            own.setdefault((pair.phase, pair.a.name), []).append(gap(pair.a, pair.b).relative)
    ratios: dict[tuple[str, str], float] = {}
    found: list[PlaceGap] = []
    largest: dict[str, float] = {}
    for place in _in_order(matching.pairs, own, made):
        ratio = place.error / place.control if place.control else math.inf if place.error else 0.0
        before = _before(place, ratios, largest)
        ratios[place.phase, place.name] = ratio
        if place.judged or place.phase != "gradients":  # a gradient that is rounding hands no error on to the update
            largest[place.phase] = max(largest.get(place.phase, 0.0), ratio)
        inherited = before * place.control if math.isfinite(before) else place.error
        added = math.sqrt(max(0.0, place.error**2 - inherited**2)) if math.isfinite(place.error) else place.error
        found.append(replace(place, inherited=inherited, added=0.0 if math.isinf(before) else added))
    return tuple(found)


def control_of(errors: Iterable[float], ulp: float) -> float:
    """Return the root mean square of the errors of controls that are known, and at least one rounding."""
    known = [error for error in errors if math.isfinite(error)]
    return max(float(np.sqrt(np.mean(np.square(known)))) if known else 0.0, ONE_ROUNDING * ulp)


def _before(place: PlaceGap, ratios: Mapping[tuple[str, str], float], largest: Mapping[str, float]) -> float:
    """Return the error over the control where the data of a place come from. ``ratios``: those of the places before it;
    ``largest``: the largest of these by pass."""
    if place.phase == "weights":
        return 0.0
    if place.phase in ("gradients", "update"):
        sides = [(p, f"{place.module}:{s}") for p in ("forward", "backward") for s in ("in", "out")]
        own = [ratios[side] for side in sides if side in ratios]
        others = [largest.get(p, 0.0) for p in ("forward", "backward", "gradients") if p != place.phase]
        return max(own if own and place.phase == "gradients" else others, default=0.0)
    so_far = largest.get(place.phase, 0.0)
    if place.enters:
        return so_far
    side = "out" if place.phase == "backward" else "in"
    return ratios.get((place.phase, f"{place.module}:{side}"), so_far)


def _in_order(pairs: Iterable[Pair], controls: Mapping[tuple[str, str], list[float]], made: bool) -> list[PlaceGap]:
    phases: dict[str, list[Pair]] = {}
    for pair in pairs:
        phases.setdefault(pair.phase, []).append(pair)
    steps = _Steps(phases)
    found: list[PlaceGap] = []
    calls, ulp = 0, 0.0
    for phase, some in phases.items():
        if phase == DIRECTIONS:
            continue
        some = _by_data(phase, some)
        elsewhere = _other_tensors(some) if phase == "backward" else set()
        top: dict[tuple[str, int], float] = {}
        for pair in some:
            key = pair.a.stack, pair.a.layer
            top[key] = max(top.get(key, 0.0), pair.a.norm, pair.b.norm)
        for pair in some:
            ulp = max(ulp, pair.a.ulp, pair.b.ulp) if phase != "weights" else max(pair.a.ulp, pair.b.ulp)
            calls += phase in ("forward", "backward")
            grown = 1.0 if made or phase == "weights" else math.sqrt(1 + calls / GROWTH)
            control = control_of(controls.get((phase, pair.a.name), ()), ulp * grown)
            seen = gap(pair.a, pair.b)
            is_noise = phase in ("gradients", "update") and max(pair.a.norm, pair.b.norm) < (
                NO_SIGNAL * top[pair.a.stack, pair.a.layer]
            )
            if phase == "gradients" and is_noise:
                steps.without_signal.add(pair.a.name)
            if phase == "update":
                seen, control = steps.gap(pair), steps.control(pair, control)
            can_judge = not (is_noise or pair.a.name in elsewhere or control >= 1)
            place = PlaceGap(
                phase=phase,
                name=pair.a.name,
                other=pair.b.name,
                stack=pair.a.stack,
                layer=pair.a.layer,
                sublayer=pair.a.sublayer,
                error=seen.relative,
                standard_error=seen.error,
                control=control,
                inherited=0.0,
                added=seen.relative,
                judged=can_judge,
            )
            found.append(place)
    return found


class _Steps:
    """The errors that rounding makes in the updates of parameters, apart from that of the passes before.

    - The gradient's rounding: an optimizer that divides by the size of the gradient moves each entry about equally far,
      however small its gradient is. Where rounding turns an entry's sign, the entry moves the other way: 1 turned sign
      in 1000 is an error of 6 %. Adam's first update is the gradient's direction, g / (|g| + eps), times a number. So
      the error of the directions of both sides is the control of the update; SGD's, a multiple of the gradient, keeps
      the control of the gradients.
    - Storage: the update is the difference of two stored parameters, and the second was rounded to the parameter's
      dtype.

    An update cannot be compared if the gradient has no signal, or if the gradients differ and their directions were not
    recorded.
    """

    def __init__(self, phases: Mapping[str, Iterable[Pair]]) -> None:
        named = {phase: {pair.a.name: pair for pair in pairs} for phase, pairs in phases.items()}
        self._weights, self._gradients = named.get("weights", {}), named.get("gradients", {})
        self._directions = named.get(DIRECTIONS, {})
        self.without_signal: set[str] = set()

    def gap(self, pair: Pair) -> Gap:
        """Return the difference of two updates, relative to the second one's norm if the first is 0."""
        return gap(pair.b, pair.a) if not pair.a.norm and pair.b.norm else gap(pair.a, pair.b)

    def control(self, pair: Pair, passes: float) -> float:
        """Return the control of an update: that of the passes before, and at least these errors. inf: no comparison."""
        name = pair.a.name
        if name in self.without_signal:
            return math.inf
        norms = pair.a.norm, pair.b.norm
        if not any(norms):
            return passes
        stored = 0.0
        if (weight := self._weights.get(name)) is not None:
            size = max(weight.a.norm, weight.b.norm) * max(weight.a.ulp, weight.b.ulp)
            stored = ONE_ROUNDING * size / (norms[0] or norms[1])
        control = max(passes, stored)
        if not all(norms):  # one side moved the parameter, the other did not: rounding stops no update
            return control
        gradient, direction = self._gradients.get(name), self._directions.get(name)
        if gradient is not None and (
            not gap(gradient.a, gradient.b).relative or _is_multiple(pair.a.sums, gradient.a.sums, control)
        ):
            return control
        if direction is None:
            return math.inf
        if direction.a.eps != direction.b.eps:  # a difference of the optimizers, which is no rounding
            return control
        ours = replace(direction.a, norm=norm_of_sums(direction.a.sums))  # an update's norm is estimated so, too
        return max(control, gap(ours, direction.b).relative)


def _is_multiple(x: np.ndarray, y: np.ndarray, within: float) -> bool:
    """Return True if the tensor with the sums ``x`` is a multiple of that with the sums ``y``, up to a relative error
    of ``within``."""
    square = float(y @ y)
    if not (math.isfinite(square) and square):
        return False
    return float(np.linalg.norm(x - (x @ y / square) * y)) <= within * float(np.linalg.norm(x))


def _by_data(phase: str, pairs: Sequence[Pair]) -> list[Pair]:
    """Order the places of a pass by the data. A module's hook runs after those of its inner modules, so that what
    enters it is put before them."""
    if phase == "backward":
        return list(_backwards(sorted(pairs, key=lambda pair: (pair.a.absent, pair.a.order))))
    if phase != "forward":
        return list(pairs)
    first: dict[str, float] = {}
    for pair in pairs:
        path = module_of(pair.a.name)
        while path:
            first[path] = min(first.get(path, math.inf), pair.a.order)
            path = path.rpartition(".")[0]

    def key(pair: Pair) -> tuple[float, int, int]:
        path = module_of(pair.a.name)
        if pair.a.name.endswith(":in"):
            return first[path], 0, path.count(".")
        return pair.a.order, 1, -path.count(".")

    return sorted(pairs, key=key)


def _backwards(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Order neighbours that have one gradient, that of one tensor: the module that yields it comes first, the innermost
    before those around it."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        same = groups and not pair.a.absent and np.array_equal(groups[-1][0].a.sums, pair.a.sums)
        groups[-1].append(pair) if same else groups.append([pair])
    for group in groups:
        yield from sorted(group, key=lambda pair: (pair.a.name.endswith(":out"), -pair.a.name.count(".")))


def _other_tensors(pairs: Sequence[Pair]) -> set[str]:
    """Return the inputs whose gradient is that of another tensor on one side: of a copy, as a cast or clone() makes it.

    The gradient of a tensor has the parts of all that take it, of a residual too; that of its copy has only one. An
    input that is one tensor with an output on one side, and not on the other, cannot be compared.
    """
    outputs: list[dict[bytes, set[str]]] = [{}, {}]
    for pair in pairs:
        if pair.a.name.endswith(":out"):
            for held, place in zip(outputs, (pair.a, pair.b), strict=True):
                held.setdefault(place.sums.tobytes(), set()).add(pair.a.name)
    first, second = outputs
    return {
        pair.a.name
        for pair in pairs
        if pair.a.name.endswith(":in")
        and first.get(pair.a.sums.tobytes(), set()) != second.get(pair.b.sums.tobytes(), set())
    }


def first_over(places: Sequence[PlaceGap], limit: float) -> PlaceGap | None:
    """Return the first place whose added error is above ``limit`` times its control."""
    return next((place for place in places if place.is_over(limit)), None)


def coarser_ulp(*prints: Fingerprint, phase: str = "forward") -> float:
    """Return the spacing at 1 of the coarsest dtype in a pass."""
    return max((p.ulp for one in prints for p in one.passes.get(phase, {}).values()), default=0.0)
