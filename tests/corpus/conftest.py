"""The scripts of results/alarm, results/alarm/second and benchmarks/faults as modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from loose_scripts import scripts_of


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Imports a module of these folders by its name."""
    with scripts_of("results/alarm", "benchmarks/faults", "results/alarm/second") as load:
        yield load
