"""Parameters of which a few run with every change, and all of them in the long checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

SOME_ARCHS = frozenset({"branchnorm", "resi-dual", "layernorm-scaling", "dlcl"})  # one of each way to add a branch


def rest_slow(values: Iterable[Any], fast: Collection[Any] = SOME_ARCHS) -> list[Any]:
    """``values``, those that are not in ``fast`` marked slow; a tuple stands for several parameters."""
    return [_slow(value) if value not in fast else value for value in values]


def _slow(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.slow)


def long(*value: Any) -> Any:
    """One parameter, a tuple, marked slow."""
    return pytest.param(value, marks=pytest.mark.slow)
