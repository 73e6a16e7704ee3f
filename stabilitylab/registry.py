"""One small decorator registry, shared by archs, probes, figures and claims."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from .errors import UsageError

T = TypeVar("T")


def spelling(name: str) -> str:
    """The form in which names are compared: ``"Post-LN"``, ``"post_ln"`` and ``"postln"`` are one name."""
    return re.sub(r"[\s_\-]+", "", name).lower()


class Registry(Mapping[str, T], Generic[T]):
    """Maps canonical names to entries; look-ups forgive case, hyphens and underscores.

    Raises ``ValueError`` for a duplicate and ``UsageError``, listing the choices, for an unknown name.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._spellings: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def decorate(entry: T) -> T:
            if spelling(name) in self._spellings:
                raise ValueError(f"{self.kind} {name!r} is registered already, as {self._spellings[spelling(name)]!r}.")
            self._entries[name] = entry
            self._spellings[spelling(name)] = name
            return entry

        return decorate

    def resolve(self, name: str) -> str:
        """The canonical name behind any accepted spelling of it."""
        known = self._spellings.get(spelling(name))
        if known is None:
            close = difflib.get_close_matches(spelling(name), self._spellings, n=1)
            hint = f" Did you mean {self._spellings[close[0]]!r}?" if close else ""
            raise UsageError(f"unknown {self.kind} {name!r}; choose one of {', '.join(sorted(self))}.{hint}")
        return known

    def __getitem__(self, name: str) -> T:
        return self._entries[self.resolve(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and spelling(name) in self._spellings

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
