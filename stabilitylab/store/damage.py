"""Warnings about a run that is not whole, each logged once."""

from __future__ import annotations

import logging

log = logging.getLogger("stabilitylab")
_told: set[str] = set()


def tell(sentence: str) -> None:
    """Warn once a process: sweeps and reports read a run many times."""
    if sentence not in _told:
        _told.add(sentence)
        log.warning("%s.", sentence)
