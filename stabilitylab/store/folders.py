"""Finds run directories below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import InputError, StabilityLabError
from .layout import METRICS
from .reader import Run


def load_runs(directory: str | Path, broken: list[tuple[Path, str]] | None = None) -> list[Run]:
    """Open every run below ``directory``, and return the runs sorted by path.

    ``broken``: a list, to which each run that cannot be read is added as (path, reason). Without it, such a run raises
    an error.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"there is no directory {directory}: give the one that holds the runs.")
    runs = []
    for path in sorted(_run_directories(directory)):
        try:
            runs.append(Run.open(path))
        except StabilityLabError as error:
            if broken is None:
                raise
            broken.append((path, str(error)))
    return runs


def run_directories(path: Path) -> list[Path]:
    """Return the runs at or below ``path``, sorted; [``path``] if there is none."""
    return sorted(_run_directories(path)) or [path]


def _run_directories(directory: Path) -> Iterator[Path]:
    for where, below, files in os.walk(directory):
        if "run.json" in files:
            if not _exported(below, files):
                yield Path(where)
            below.clear()


def _exported(below: Sequence[str], files: Sequence[str]) -> bool:
    """True if ``stabilitylab export`` wrote this folder. An export has run.json beside one file a table; a run has
    status.json and a folder of metrics."""
    tables = any(name.endswith((".csv", ".parquet")) for name in files)
    return tables and "status.json" not in files and METRICS not in below
