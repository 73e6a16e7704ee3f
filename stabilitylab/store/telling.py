"""Says once what is not whole of a run that is read."""

from __future__ import annotations

import logging

log = logging.getLogger("stabilitylab")
_told: set[str] = set()


def tell(sentence: str) -> None:
    """Warns once a process: sweeps and reports read a run many times."""
    if sentence not in _told:
        _told.add(sentence)
        log.warning("%s.", sentence)
