"""Parameters are split over ranks where the caller says so, and one of them has less than a copy on each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stabilitylab.probes.parameters.pieces import Parameters


def parameters(shares: list[float], said: bool, known: bool = True) -> Any:
    """Parameters on four ranks, each with so much of a parameter that its part counts ``shares`` times over all."""
    found = SimpleNamespace(said=said) if known else None
    ranks = SimpleNamespace(known=known, found=found, size=4, layout=lambda share: SimpleNamespace(share=share))
    return SimpleNamespace(_ranks=ranks, _own=shares)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (parameters([0.25, 0.25], said=True), False),  # copies: a rank's part counts a quarter
        (parameters([0.25, 0.5], said=True), True),  # one of two halves, each held twice
        (parameters([1.0], said=True), True),
        (parameters([1.0], said=False), False),  # a DTensor says it itself
        (parameters([1.0], said=False, known=False), False),  # nothing is known before the first forward
    ],
)
def test_split_is_what_the_caller_says(made: Any, expected: bool) -> None:
    assert Parameters.split.fget(made) is expected  # type: ignore[attr-defined]
