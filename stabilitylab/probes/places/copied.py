"""Hooks of a watched module that a copy of the module does not carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Copied:
    """A hook that a copy or a pickle of the module replaces by :func:`nothing`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_kept, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a copy of a watched model calls this in place of the hooks."""


def _nothing_kept() -> Callable[..., None]:
    return nothing
