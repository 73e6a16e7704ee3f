"""Directional derivatives in float64: the backward pass against finite differences of the loss, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import StabilityLabError, UsageError, first_line, listed
from ..probes import evaluation
from ..probes.places.naming import modules_of, parameters_of
from ..probes.state import multipliers
from .batches import changed, restored
from .findings import AuditFinding
from .flight import Flight
from .replay import DeclaredLoop, loss_of
from .replicas import joined

STEP = 1e-6  # of the parameters' norm
TOLERANCE = 1e-2  # relative; truncation and rounding are below 1e-5 for smooth losses, kinks of a ReLU add to them
ROUNDED, POINTS = 1e-8, 9  # a third difference of the loss above this is rounding; a float32 has 1e-7
SMALL = 1e-9  # a derivative below this share of the loss is rounding


@dataclass(frozen=True)
class Derivative:
    """The derivative of the loss along one direction of a group of parameters: by backward, and by differences.
    ``doubled``: the difference with twice the step, which differs where the loss is not smooth, or rounded."""

    group: str
    direction: str
    backward: float
    difference: float
    doubled: float

    @property
    def is_exact(self) -> bool:
        """True if the two differences agree, so that they can judge."""
        return _close(self.difference, self.doubled)

    @property
    def agrees(self) -> bool:
        return _close(self.backward, self.difference)


def derivatives(flight: Flight, loop: DeclaredLoop, start: int | None = None) -> list[Derivative]:
    """Return derivatives (L(theta + h d) - L(theta - h d)) / 2h and <gradient, d> of each group of parameters.

    The model is in float64 and eval mode, with the weights of snapshot ``start`` (the newest), its batch the next
    recorded one. d is the gradient's direction, and a vector of signs that depend on indices alone: the former finds a
    wrong sign or size, the latter a part that backward leaves out. A group is a layer: the names up to a first number.
    """
    start = max(flight.snapshots) if start is None else start
    update = next(flight.replayable(start))
    widened = changed(
        flight.batches[update.batches[0]], lambda _, one: one.double() if one.is_floating_point() else one
    )
    with loop.kept():  # in place: a copy of a model with patched methods would call the original's
        loop.restore(flight.snapshots[start])
        loop.model.double()
        with evaluation(loop.model), torch.enable_grad():
            return _measured(loop, restored(widened, loop.device))


def derivative_findings(flight: Flight, loop: DeclaredLoop) -> tuple[list[AuditFinding], list[str]]:
    """Return the layers whose backward is not the derivative of the loss, and why none was looked at. Each of several
    processes looks at a batch of its own; the findings are those of all."""
    found, why = _own_findings(flight, loop)
    reasons = [one for own in loop.processes.gathered(why) for one in own]
    return joined(found, loop.processes), list(dict.fromkeys(reasons))


def _own_findings(flight: Flight, loop: DeclaredLoop) -> tuple[list[AuditFinding], list[str]]:
    if inexact := _inexact(loop.model):
        return [], [f"derivatives were not checked: backward differs from the gradient by design in {inexact}"]
    try:
        found = derivatives(flight, loop)
    except (StabilityLabError, RuntimeError, TypeError, ValueError, StopIteration) as error:
        said = first_line(error).rstrip(".")
        return [], [f"derivatives were not checked in float64: {said}"]
    wrong: dict[str, Derivative] = {}
    for one in found:
        if one.is_exact and not one.agrees and one.group not in wrong:
            wrong[one.group] = one
    rough = list(dict.fromkeys(one.group for one in found if not one.is_exact and not one.agrees))
    why = [f"derivatives of {listed(rough)}: the loss is rounded or not smooth there"] if rough else []
    return [_finding(one, max(flight.snapshots)) for one in _nearest_to_loss(wrong, found)], why


def _inexact(model: nn.Module) -> str:
    """Name the first module that declares ``exact_gradient = False``, as the layers of GPAS do; "" without one."""
    declared = (name for name, own in modules_of(model).items() if getattr(own, "exact_gradient", True) is False)
    return next((name or "the model" for name in declared), "")


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) + SMALL


def groups_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of parameters by layer: the parts up to the first number, or the first part."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((n for n, part in enumerate(parts) if part.isdecimal()), 0)
        groups.setdefault(".".join(parts[: at + 1]), []).append(name)
    return groups


def _measured(loop: DeclaredLoop, batch: Any) -> list[Derivative]:
    model = loop.model
    parameters = {name: one for name, one in parameters_of(model).items() if one.requires_grad}
    loss = loss_of(loop, batch, loop.replica)
    if loss.dtype != torch.float64:
        raise UsageError(f"loss_fn computes in {loss.dtype} also where the model is in float64")
    if not loss.isfinite():
        raise UsageError("the loss of the recorded weights is not finite")
    loss.backward()
    if (rounding := _rounding(loop, batch, parameters)) > ROUNDED * max(1.0, abs(float(loss.detach()))):
        raise UsageError(f"inside loss_fn numbers are rounded to less than float64 (by about {rounding:.1g})")
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach() for n, p in parameters.items()}
    found = []
    for group, names in groups_of(list(parameters)).items():
        own = {name: parameters[name] for name in names}
        directions = {
            "gradient": {name: gradients[name] for name in names},
            "signs": {n: _signs(p) for n, p in own.items()},
        }
        for direction, vectors in directions.items():
            length = _norm(vectors.values())
            if length == 0:
                continue
            size = STEP * max(1.0, _norm(own.values()))
            unit = {name: vector / length for name, vector in vectors.items()}
            slope = sum(float((gradients[name] * unit[name]).sum()) for name in names)
            one, two = (_difference(loop, batch, own, unit, length) for length in (size, 2 * size))
            found.append(Derivative(group, direction, slope, one, two))
    return found


def _difference(
    loop: DeclaredLoop, batch: Any, own: Mapping[str, nn.Parameter], unit: Mapping[str, Tensor], size: float
) -> float:
    ahead, behind = _losses_along(loop, batch, own, unit, (size, -size))
    return (ahead - behind) / (2 * size)


def _rounding(loop: DeclaredLoop, batch: Any, parameters: Mapping[str, nn.Parameter]) -> float:
    """Return the largest third difference of the loss along one line: of a smooth loss in float64 it is that of a cubic
    over a short way, next to 0; a loss that is rounded on its way to the result has steps."""
    size = STEP * max(1.0, _norm(parameters.values()))
    unit = {name: _signs(one) / math.sqrt(max(1, one.numel() * len(parameters))) for name, one in parameters.items()}
    values = _losses_along(loop, batch, parameters, unit, [number * size for number in range(POINTS)])
    return float(np.abs(np.diff(values, 3)).max())


def _losses_along(
    loop: DeclaredLoop,
    batch: Any,
    parameters: Mapping[str, nn.Parameter],
    direction: Mapping[str, Tensor],
    lengths: Sequence[float],
) -> list[float]:
    """Return the loss where the parameters are moved along a direction, by each of the lengths; then put them back."""
    kept = {name: one.detach().clone() for name, one in parameters.items()}
    values = []
    with torch.no_grad():
        for length in lengths:
            for name, one in parameters.items():
                one.copy_(kept[name] + length * direction[name])
            values.append(float(loss_of(loop, batch, loop.replica)))
        for name, one in parameters.items():
            one.copy_(kept[name])
    return values


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(one.detach().square().sum()) for one in tensors))


def _signs(tensor: Tensor) -> Tensor:
    bits = (multipliers(tensor.numel(), tensor.device) >> 33) & 1
    return (bits.to(tensor.dtype) * 2 - 1).view(tensor.shape)


def _nearest_to_loss(wrong: Mapping[str, Derivative], found: Sequence[Derivative]) -> list[Derivative]:
    """Return the wrong group that is registered last. A gradient that is wrong at one layer is wrong below it too; the
    layer nearest to the loss is where it begins."""
    order = list(dict.fromkeys(one.group for one in found))
    return [wrong[max(wrong, key=order.index)]] if wrong else []


def _finding(one: Derivative, step: int) -> AuditFinding:
    ratio = one.backward / one.difference if one.difference else math.inf
    if abs(ratio + 1) < TOLERANCE:
        said = f"backward has the opposite sign in {one.group}"
    elif abs(one.backward) <= SMALL:
        said = f"backward gives no gradient in {one.group}, though the loss depends on it"
    else:
        said = f"backward is not the derivative of the loss in {one.group}: {ratio:.4g} times it"
    evidence = (
        f"in float64 the loss has the slope {one.difference:.4g} along the {one.direction}, backward {one.backward:.4g}"
    )
    return AuditFinding("derivative", one.group, step, said, evidence, factor=ratio)
