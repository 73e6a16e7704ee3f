"""Names that columns had before: those of pandas' own methods, which ``frame.NAME`` gives instead of the column."""

from __future__ import annotations

from collections.abc import Container

RENAMED = {"stack": "stack_name"}  # old -> new
BEFORE = {new: old for old, new in RENAMED.items()}


def found_as(name: str, present: Container[str]) -> str:
    """What the column ``name`` is called among ``present``: its old name where only that is there."""
    return BEFORE[name] if name in BEFORE and name not in present and BEFORE[name] in present else name


def today(name: str, present: Container[str]) -> str:
    """What replaced ``name`` where only that is among ``present``, else ``name``."""
    return RENAMED[name] if name in RENAMED and name not in present and RENAMED[name] in present else name
