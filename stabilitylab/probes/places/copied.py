"""Hooks of a watched module that a copy of the module does not carry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

# This function replaces the hooks of a copy or a pickle. It takes any arguments and returns None. It belongs to the
# standard library, so a model that was saved while it was watched can be loaded where this package is not installed.
nothing: Callable[..., None] = nullcontext().__exit__


class Copied:
    """A hook that a copy or a pickle of the module replaces by :data:`nothing`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing


class Calling(Copied):
    """A hook that calls a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)


def _nothing_kept() -> Callable[..., None]:
    """Return :data:`nothing`. Pickles of older versions ask for it."""
    return nothing
