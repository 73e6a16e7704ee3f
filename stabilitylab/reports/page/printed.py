"""The list of what was printed, so that a figure that has not changed is not printed again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...store.files import replace_file
from .. import style
from ..base import Picture

FILE = ".printed.json"  # beside the files of the figures
PRINTERS = ("matplotlib", "seaborn", "pandas", "pyarrow")


def digest(picture: Picture, *words: str) -> str:
    """Return a digest of all that decides a figure's files: its picture, its words, and the code that prints it."""
    return sha256(pickle.dumps((picture, words, _printers()), protocol=5)).hexdigest()


@cache
def _printers() -> tuple[str, ...]:
    sources = sorted(Path(__file__).parents[1].glob("*.py"))
    code = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return code, repr(style.looks()), *map(_version, PRINTERS)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Printed:
    """The figures of one folder by name: the digest of each, and size and time of its files."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, RecursionError, UnicodeDecodeError, ValueError):
            found = {}
        self._known: dict[str, Any] = found if isinstance(found, dict) else {}

    def stands(self, name: str, own: str, files: Collection[Path]) -> bool:
        """True if the files of this figure are those that were printed from the same picture."""
        return name in self._known and self._known[name] == _entry(own, files) is not None

    def note(self, name: str, own: str, files: Collection[Path]) -> None:
        """Note a figure that was printed."""
        self._known[name] = _entry(own, files)

    def write(self) -> None:
        """Write the list beside the files."""
        replace_file(self._path, json.dumps(self._known).encode())


def _entry(own: str, files: Collection[Path]) -> list[Any] | None:
    """Return the digest with size and time of each file; None if a file is missing."""
    try:
        stamps = [[path.name, found.st_size, found.st_mtime_ns] for path in files if (found := path.stat())]
    except OSError:
        return None
    return [own, sorted(stamps)]
