"""What a copy of a watched module has in place of its hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Copied:
    """A hook of which a copy or a pickle of the module carries none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_kept, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a copy of a watched model has in place of its hooks."""


def _nothing_kept() -> Callable[..., None]:
    return nothing
