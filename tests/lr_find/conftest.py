"""The tests of searches write many small runs; none of them cuts the power."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the syncs to the disk, which take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
