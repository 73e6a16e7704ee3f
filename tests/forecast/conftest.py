"""The scripts of results/forecast, as modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from loose_scripts import scripts_of

NAMES = ("draw", "fit", "forecasters", "loading", "make", "measures", "score", "tell", "truth")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with scripts_of("results/forecast") as load:
        yield SimpleNamespace(**{name: load(name) for name in NAMES})
