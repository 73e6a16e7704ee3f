"""The steps at which rows were recorded, as ranges."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import listed

Ranges = tuple[tuple[int, int, int], ...]  # (first, last, distance) each


def ranges(steps: Sequence[int]) -> Ranges:
    """Return rising steps as ranges, each as long as it can be from the left."""
    found: list[tuple[int, int, int]] = []
    at, last = 0, len(steps) - 1
    while at < last:
        distance, end = steps[at + 1] - steps[at], at + 1
        while end < last and steps[end + 1] - steps[end] == distance:
            end += 1
        found.append((steps[at], steps[end], distance))
        at = end + 1
    return (*found, (steps[last], steps[last], 1)) if at == last else tuple(found)


def count(steps: Ranges) -> int:
    return sum(len(range(first, last + 1, distance)) for first, last, distance in steps)


def is_in(step: int, steps: Ranges) -> bool:
    return any(step in range(first, last + 1, distance) for first, last, distance in steps)


def step_of(number: int, steps: Ranges) -> int:
    """Return the step of row ``number``, from 1 on. Raises IndexError beyond the last row."""
    for first, last, distance in steps:
        rows = len(range(first, last + 1, distance))
        if number <= rows:
            return first + (number - 1) * distance
        number -= rows
    raise IndexError(number)


def rises(steps: Ranges) -> bool:
    """True if the ranges are those of rising steps."""
    ends = [-1, *(last for _, last, _ in steps)]
    return all(before < first <= last for before, (first, last, _) in zip(ends, steps, strict=False))


def in_words(steps: Ranges) -> str:
    told = [f"{first} to {last} by {distance}" if last > first else f"{first}" for first, last, distance in steps]
    return listed(told)
