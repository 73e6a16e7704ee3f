"""Comparison of the copies of a parameter on several ranks, by sums over their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .ranks import gathered

ROUNDING = 1e-5  # relative difference up to which two gradients' sums count as equal


class Gradient(NamedTuple):
    """A parameter's gradient on this rank; ``part``: the number of the part that the rank holds."""

    name: str
    part: int
    value: torch.Tensor | None


class GradientSums(NamedTuple):
    """A gradient's shape, and the numbers that are compared: the sum of its entries, the sum of their sizes, its L2
    norm. ``numbers`` is None for an absent gradient."""

    shape: tuple[int, ...]
    numbers: tuple[float, float, float] | None


def differing(gradients: Sequence[Gradient]) -> list[str]:
    """Return the names of parameters whose gradients differ between ranks that hold the same part, and of parameters
    that a rank does not have. The list is the same on every rank. Every rank must call this. The call waits for the
    device."""
    own = {(each.name, each.part): summed(each.value) for each in gradients}
    everyone = gathered(own)
    firsts: dict[tuple[str, int], GradientSums] = {}
    apart: dict[str, None] = {}
    names = [{name for name, _ in each} for each in everyone]
    for each in everyone:
        for (name, part), sums in each.items():
            missing = any(name not in known for known in names)
            if missing or not alike(firsts.setdefault((name, part), sums), sums):
                apart[name] = None
    return list(apart)


def summed(gradient: torch.Tensor | None) -> GradientSums:
    """Return the numbers by which a gradient is compared."""
    if gradient is None:
        return GradientSums((), None)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = torch.view_as_real(values) if values.is_complex() else values
    sizes = [torch.linalg.vector_norm(values, order, dtype=torch.float64) for order in (1, 2)]
    numbers = torch.stack([values.sum(dtype=torch.float64), *sizes]).tolist()
    return GradientSums(tuple(gradient.shape), tuple(numbers))


def alike(one: GradientSums, other: GradientSums, rounding: float = ROUNDING) -> bool:
    """True if two gradients' numbers are equal up to ``rounding``, relative to their sizes."""
    if one.numbers is None or other.numbers is None:
        return one == other
    if one.shape != other.shape:
        return False
    scales = (max(one.numbers[1], other.numbers[1]), one.numbers[1], one.numbers[2])
    pairs = zip(one.numbers, other.numbers, scales, strict=True)
    return all(repr(a) == repr(b) or abs(a - b) <= rounding * scale for a, b, scale in pairs)
