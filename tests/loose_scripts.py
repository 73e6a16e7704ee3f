"""Scripts of results/ and benchmarks/ as modules, whatever else has their names: tests/zoo has a ``truth``, too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def scripts_of(*folders: str) -> Iterator[Callable[[str], ModuleType]]:
    """What imports a script of these folders (below the repository's root) by its name.

    Outside, a module of that name is what it was before.
    """
    homes = [ROOT / folder for folder in folders]
    names = {path.stem for home in homes for path in home.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    path = [*sys.path]
    sys.path[:0] = map(str, homes)
    try:
        yield import_module
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)
