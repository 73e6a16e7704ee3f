"""Records that a resume does not continue from are kept below ``aside/``; nothing there is ever overwritten."""

from __future__ import annotations

import os
from itertools import chain, count
from pathlib import Path

from ..errors import InputError
from . import inventory
from .files import inside, make_directory, reading, sync_directory, writing
from .identity import Identity
from .layout import METRICS, journals, parts, tables_on_disk


def check_complete(run: Path, part: int, identity: Identity) -> None:
    """Raise InputError if a part before ``part`` is missing, unless the inventory notes that its journal gave no
    part."""
    with reading(run):
        present = journals(run).keys() | parts(run, METRICS).keys()
    found = inventory.read(run, identity)
    noted = {} if found is None else found.left_out
    missing = [number for number in range(1, part) if number not in present and number not in noted]
    if missing:
        raise InputError(f"{run} lacks part {missing[0]}, which comes before its checkpoint: restore it from a copy.")


def set_aside(run: Path, part: int, attempt: int) -> None:
    """Move the records after the checkpoint, from ``part`` on, to aside/, and delete files that were not written
    whole."""
    with reading(run):
        later = [path for name in tables_on_disk(run) for number, path in parts(run, name).items() if number >= part]
        later += [path for number, path in journals(run).items() if number >= part]
    with writing(run):
        for path in later:
            os.replace(path, free_place(run, f"attempt-{attempt}", path))
        for path in run.rglob(".*.tmp"):
            os.unlink(path)
        for path in {path.parent for path in later}:
            sync_directory(path)


def free_place(run: Path, folder: str, path: Path) -> Path:
    """Return a path for ``path`` below aside/ at which nothing exists, and make its folder."""
    names = chain([folder], (f"{folder}-{number}" for number in count(2)))
    places = (run / "aside" / name / path.relative_to(run) for name in names)
    target = inside(run, next(place for place in places if not place.exists()))
    make_directory(target.parent)
    return target
