"""Public names of a package that are imported at their first use, since their modules need torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (PEP 562). ``homes``: name -> the module of the package that has it; "":
    the name is that of the module itself."""

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{homes[name] or name}", package)
        return getattr(module, name) if homes[name] else module

    return found
