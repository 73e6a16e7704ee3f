"""SplitMix64, a fixed random number for each index, on any device (Steele, Lea, Flood: "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014)."""

from __future__ import annotations

import torch

GOLDEN, FIRST, SECOND = (  # the constants as signed numbers
    number - (1 << 64) for number in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
)


def splitmix64(index: torch.Tensor) -> torch.Tensor:
    """Return number ``index`` + 1 of the sequence that starts at 0, for each entry of ``index``: int64."""
    mixed = (index + 1) * GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * SECOND
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, as unsigned numbers do."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
