"""Parameters of which a few run with every change, more in the long checks, and each with ``EVERY=1``."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest

EVERY = os.environ.get("EVERY", "") not in ("", "0")
SOME_ARCHS = frozenset({"branchnorm", "resi-dual", "layernorm-scaling", "dlcl"})  # one of each way to add a branch
MORE_ARCHS = SOME_ARCHS | {"admin", "normformer", "sandwich", "rezero"}  # and of each kind of gain and place of a norm


# Of a long test of a script that has made all of its evidence: nobody runs the script until a release.
complete = pytest.mark.skipif(not EVERY, reason="a script whose evidence is complete; EVERY=1 tries it")
slow = partial(pytest.param, marks=pytest.mark.slow)  # one case, given by its parameters


def rest_slow(
    values: Iterable[Any], fast: Collection[Any] = SOME_ARCHS, slow: Collection[Any] | None = None
) -> list[Any]:
    """``values``, those that are not in ``fast`` marked slow; a tuple stands for several parameters.

    ``slow``: those of the long checks; the others are skipped without ``EVERY=1``. None: all of them.
    """
    return [value if value in fast else _slow(value, slow is None or value in slow) for value in values]


def _slow(value: Any, always: bool) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    rest = pytest.mark.skipif(not (always or EVERY), reason="one of many alike; EVERY=1 tries them all")
    return pytest.param(*several, marks=[pytest.mark.slow, rest])


def long(*value: Any) -> Any:
    """One parameter, a tuple, marked slow."""
    return slow(value)


def rare(*value: Any) -> Any:
    """One parameter, a tuple, that only ``EVERY=1`` tries."""
    return _slow((value,), always=False)
