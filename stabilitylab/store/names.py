"""Former names of columns. They are names of pandas' own methods, which ``frame.NAME`` gives instead of the column."""

from __future__ import annotations

from collections.abc import Container, Sequence

PLACES = {"stack": "stack_name"}  # old -> new, in every table
VALUES: dict[str, dict[str, str]] = {  # table -> old -> new, for the table's own columns
    "branch_variance": {"sum": "total"},
    "logits": {"mean": "mean_logit"},
    "outliers": {"kurtosis": "pearson_kurtosis"},
}
RENAMED = {old: new for names in (PLACES, *VALUES.values()) for old, new in names.items()}
BEFORE = {new: old for old, new in RENAMED.items()}


def current(table: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Return a table's own columns in today's names."""
    names = VALUES.get(table, {})
    return tuple(names.get(column, column) for column in columns)


def found_as(name: str, present: Container[str]) -> str:
    """Return the name of the column ``name`` among ``present``: its former name if only that is there."""
    return BEFORE[name] if name in BEFORE and name not in present and BEFORE[name] in present else name


def today(name: str, present: Container[str]) -> str:
    """Return the name that replaced ``name`` if only that is among ``present``, else ``name``."""
    return RENAMED[name] if name in RENAMED and name not in present and RENAMED[name] in present else name


def moved(old: str, new: str) -> str:
    """Return the warning about a column's former name."""
    return f"the column {old!r} is called {new!r} now, since DataFrame.{old} is a method of pandas: use the new name"
