"""Shared by the tests of the probes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stabilitylab.probes import PROBES


@pytest.fixture
def scratch() -> Iterator[None]:
    """Probes that a test registers are gone after it."""
    with PROBES.restored():
        yield
