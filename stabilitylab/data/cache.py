"""A cache of arrays between runs. The name of an entry identifies its sources; a lost entry only costs time."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)


def folder() -> Path:
    """Return ``$STABILITYLAB_CACHE``, or ``stabilitylab`` in the user's cache directory."""
    if chosen := os.environ.get("STABILITYLAB_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stabilitylab"


def load(name: str) -> dict[str, np.ndarray] | None:
    """Load the arrays that :func:`save` stored as ``name``; None if there are none, or if the file is damaged (zip
    checks a CRC)."""
    path = folder() / f"{name}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as entry:
            return {key: entry[key] for key in entry.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("cannot use the cache entry %s (%s); making it again.", path, error)
        return None


def save(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Store all arrays or none: neither a reader nor a second writer ever sees a part of an entry."""
    temporary = None
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder(), prefix=f".{name}-", delete=False) as file:
            temporary = Path(file.name)
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        temporary.replace(folder() / f"{name}.npz")
    except OSError as error:
        logger.warning("cannot write to the cache %s (%s); going on without it.", folder(), error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
