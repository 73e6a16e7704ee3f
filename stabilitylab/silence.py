"""Warnings of the package left unsaid for a while, where a result says all that its reader needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(logger: str = "stabilitylab") -> Iterator[None]:
    """Let only errors of a logger pass inside this context."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
