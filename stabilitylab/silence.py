"""Warnings of the package left unsaid for a while, where a result says all that its reader needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced() -> Iterator[None]:
    """Let only errors of the package's log pass inside this context."""
    log = logging.getLogger("stabilitylab")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
