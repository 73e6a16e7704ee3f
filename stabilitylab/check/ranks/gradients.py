"""Gradients before the optimizer's step: equal where ranks hold the same part, and derivatives of the mean loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import listed
from ...probes.parameters.agreement import summed
from ...probes.places.naming import modules_of
from ..bounds import not_checked, weigh, weigh_names
from ..result import Check
from .members import Members, holders, names_of, parted, said, same_sums
from .passes import RankPasses, own_values

COPIES, SCALE = "gradient copies", "gradient scale"
MOST = 24  # kinds of parameters whose derivatives are taken, the largest gradients first
STEPS = (2e-3, 2e-2, 2e-1)  # changes of the loss, over the loss, that are aimed at
SETTLED = 0.1  # relative difference up to which two measurements, and a ratio and a number, count as equal

OVER_TENSOR = (
    "add up the gradients of what tensor ranks hold alike, such as norms under sequence parallelism, over the tensor "
    "group after backward"
)
OVER_DATA = (
    "call the DistributedDataParallel or fully_shard model itself in the loss, or give after_backward=, the function "
    "that averages gradients"
)


def copies(members: Members, gradients: Mapping[str, Tensor | None]) -> tuple[Check, frozenset[str]]:
    """Check that ranks which hold the same part of a parameter have the same gradient; return the names that differ
    too."""
    each = members.gather(lambda: {name: (members.parts[name], summed(value)) for name, value in gradients.items()})
    apart = [(name, held) for name, held in holders(each) if parted(held, same_sums)]
    if not any(len(held) > 1 for _, held in holders(each)):
        return not_checked(COPIES, "no two ranks hold the same part of a trainable parameter"), frozenset()
    names = list(dict.fromkeys(name for name, _ in apart))
    if not names:
        measured = f"{len(gradients)} gradients, equal where several ranks hold the parameter"
        return weigh_names(COPIES, names, measured), frozenset()
    within = any(_parted_within(members, held) for _, held in apart)
    ranks = sorted({rank for _, held in apart for rank, _ in held})
    where = "tensor ranks" if within else "data ranks"
    measured = f"{len(names)} of {len(gradients)}: {listed(names)} differ between {where} ({said(ranks)})"
    remedy = OVER_TENSOR if within else OVER_DATA
    return weigh_names(COPIES, names, measured, remedy=remedy), frozenset(names)


def _parted_within(members: Members, held: Sequence[tuple[int, object]]) -> bool:
    """True if ranks of one data rank differ."""
    by_data: dict[int, list[tuple[int, object]]] = {}
    for rank, value in held:
        by_data.setdefault(members.data[rank], []).append((rank, value))
    return any(parted(own, same_sums) for own in by_data.values())


def scale(
    members: Members, passes: RankPasses, gradients: Mapping[str, Tensor | None], apart: frozenset[str], loss: float
) -> Check:
    """Check each kind of parameter's gradient against the derivative of the ranks' mean loss along this gradient.

    The derivative is a central difference: (L(theta + d) - L(theta - d)) against the sum of gradient times 2 d, which
    is 1 to 1 for a gradient of that loss. A ratio near the number of ranks, data ranks or tensor ranks, or near one
    over it, is a sum or a mean too many. A kind is all parameters of one name in all layers.
    """
    sizes = {members.size, members.data_ranks, members.tensor_ranks} - {1}
    factors = sorted({*map(float, sizes), *(1 / size for size in sizes)})
    mean_loss = members.mean([loss])[0]
    norms = members.gather(lambda: {name: _square(members, name, value) for name, value in gradients.items()})
    kinds: dict[str, str] = {}
    for own_kinds in members.gather(lambda: _kinds(passes, gradients)):
        kinds = {**own_kinds, **kinds}
    totals: dict[str, float] = {}
    for name in names_of(norms):
        if name not in apart:
            kind = kinds[name]
            totals[kind] = totals.get(kind, 0.0) + sum(own.get(name, 0.0) for own in norms)
    usable = {kind: total for kind, total in totals.items() if total > 0 and math.isfinite(total)}
    if not usable or not math.isfinite(mean_loss) or mean_loss == 0:
        return not_checked(SCALE, "the gradients of copies differ" if apart else "there is no gradient or no loss")
    judged = sorted(usable, key=lambda kind: -usable[kind])[:MOST]
    ratios = {}
    for kind in judged:
        names = [name for name in gradients if kinds[name] == kind and name not in apart]
        ratios[kind] = _ratio(members, passes, gradients, names, abs(mean_loss), math.sqrt(usable[kind]))
    wrong = {
        kind: factor
        for kind, ratio in ratios.items()
        for factor in factors
        if abs(ratio / factor - 1) <= SETTLED and abs(ratio - 1) > SETTLED
    }
    settled = [kind for kind, ratio in ratios.items() if math.isfinite(ratio)]
    if not settled:
        return not_checked(SCALE, "no derivative of the loss could be told from its rounding")
    if not wrong:
        odd = [kind for kind in settled if abs(ratios[kind] - 1) > SETTLED]
        rest = "" if len(settled) == len(judged) else f", {len(judged) - len(settled)} could not be told from rounding"
        if odd:
            told = f"the gradient of {listed(odd)} is {ratios[odd[0]]:.3g} times the derivative of the mean loss"
            return not_checked(SCALE, f"{told}, which no number of ranks explains")
        return weigh(SCALE, 0.0, f"{len(settled)} kinds of parameters have the derivative of the mean loss{rest}")
    first = next(iter(wrong))
    whole = len(wrong) == len(settled)
    which = "every kind of parameter" if whole else f"{len(wrong)} of {len(settled)} kinds: {listed(list(wrong))}"
    measured = f"{which}: the gradient is {ratios[first]:.3g} times the derivative of the ranks' mean loss"
    remedy = "" if whole else OVER_TENSOR if members.tensor_ranks > 1 else ""
    return weigh(SCALE, float(len(wrong)), measured, site=first, remedy=remedy)


def _ratio(
    members: Members,
    passes: RankPasses,
    gradients: Mapping[str, Tensor | None],
    names: Sequence[str],
    loss: float,
    norm: float,
) -> float:
    """Return gradient over derivative for some parameters; NaN if two steps of different length do not agree."""
    for share in STEPS:
        length = share * loss / (2 * norm**2)
        first, second = (_once(members, passes, gradients, names, length * part) for part in (1.0, 0.5))
        if not _agree(first, second):
            continue
        if abs(second - 1) <= SETTLED or _agree(second, _once(members, passes, gradients, names, length / 4)):
            return second
    return math.nan


def _once(
    members: Members, passes: RankPasses, gradients: Mapping[str, Tensor | None], names: Sequence[str], length: float
) -> float:
    """Return gradient over derivative from a central difference along the gradient, times ``length``."""
    values = own_values(members)
    before = {name: values[name].clone() for name in names}
    losses: list[float] = []
    moved = {name: torch.zeros((), dtype=torch.float64, device=values[name].device) for name in names}
    try:
        for sign in (1.0, -1.0):
            for name in names:
                if (gradient := gradients[name]) is not None:
                    values[name].copy_(before[name] + (sign * length) * gradient.to(before[name].dtype))
                    change = (values[name].double() - before[name].double()) * gradient.double()
                    moved[name] += sign * change.sum()
            losses.append(passes.loss())
    finally:
        for name in names:
            values[name].copy_(before[name])
    predicted = sum(float(moved[name]) * members.shares[name] for name in names)
    plus, minus, total = members.mean([losses[0], losses[1], predicted * members.size])
    return total / (plus - minus) if plus != minus else math.nan


def _agree(one: float, other: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= SETTLED * abs(other)


def _square(members: Members, name: str, value: Tensor | None) -> float:
    """Return this rank's share of the squared norm of a gradient."""
    return 0.0 if value is None else float(value.double().square().sum()) * members.shares[name]


def _kinds(passes: RankPasses, names: Iterable[str]) -> dict[str, str]:
    """Map each name to its kind: the name without the number of its layer, if the modules are of one class too."""
    modules = modules_of(passes.model)
    classes: dict[str, type] = {}
    kinds = {}
    for name in names:
        kind = re.sub(r"(^|\.)\d+\.", r"\1*.", name, count=1)
        own = type(modules.get(name.rpartition(".")[0]))
        kinds[name] = kind if classes.setdefault(kind, own) is own else name
    return kinds
