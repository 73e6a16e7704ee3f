"""The relation between a recorded and a replayed tensor, read from their sketches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

CLOSE = 1e-4  # of the norm: rounding of a scaled float32 tensor is 1e-7, another tensor differs by its whole size
ALIKE = 1e-3  # two factors that differ by less are one


@dataclass(frozen=True)
class Relation:
    """``kind``: "scale" (the recorded one is ``factor`` times the replayed one), "zero", "missing" (no gradient),
    "new" (there was none in the replay), the name of a tensor that was added, or "other"."""

    kind: str
    factor: float = math.nan


def relation(
    recorded: Sequence[float], replayed: Sequence[float], there: tuple[bool, bool], added: Mapping[str, Sequence[float]]
) -> Relation:
    """Compare (||x||^2, p1, p2) of a recorded and a replayed tensor; ``there``: each of them exists. ``added``: by
    name, the sketches of tensors whose sum with the replayed one is tried."""
    if there[0] != there[1]:
        return Relation("missing" if there[1] else "new")
    norm, other = math.sqrt(recorded[0]), math.sqrt(replayed[0])
    if norm == 0:
        return Relation("zero")
    if other == 0:
        return Relation("new")
    for sign in (1.0, -1.0):
        factor = sign * norm / other
        if all(abs(recorded[k] - factor * replayed[k]) <= CLOSE * norm for k in (1, 2)):
            return Relation("scale", factor)
    for name, extra in added.items():
        if any(extra) and all(abs(recorded[k] - replayed[k] - extra[k]) <= CLOSE * norm for k in (1, 2)):
            return Relation(name)
    return Relation("other")


def relations(
    recorded: Tensor,
    replayed: Tensor,
    there: Sequence[tuple[bool, bool]],
    at: Sequence[int],
    added: Mapping[str, Tensor],
) -> dict[int, Relation]:
    """Return the relation of each of the tensors ``at``, by number; the arguments are sketches' (n, 3) numbers."""
    return {
        number: relation(
            recorded[number].tolist(),
            replayed[number].tolist(),
            there[number],
            {name: numbers[number].tolist() for name, numbers in added.items()},
        )
        for number in at
    }


def common(found: Mapping[int, Relation]) -> Relation | None:
    """Return the relation that all of them have, None if there are several. Tensors of a norm that is 0 on both sides
    are no evidence and were left out before."""
    kinds = {one.kind for one in found.values()}
    if len(kinds) != 1:
        return None
    first = next(iter(found.values()))
    if first.kind != "scale":
        return first
    factors = [one.factor for one in found.values()]
    middle = sorted(factors)[len(factors) // 2]
    if any(abs(one - middle) > ALIKE * abs(middle) for one in factors):
        return None
    return Relation("scale", middle)
