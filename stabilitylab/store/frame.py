"""A table as a data frame in which the names that columns had before still answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd

from .names import moved, today


class Frame(pd.DataFrame):
    """A pandas DataFrame; ``stack`` means ``stack_name``, with a warning, in ``[...]``, ``groupby`` and ``query``, as
    do the other names of :data:`stabilitylab.store.names.RENAMED`."""

    @property
    def _constructor(self) -> Callable[..., Frame]:
        return Frame

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._today(key))

    def groupby(self, by: Any = None, *arguments: Any, **options: Any) -> Any:
        return super().groupby(self._today(by), *arguments, **options)

    def eval(self, expr: str, *arguments: Any, **options: Any) -> Any:  # query calls it
        options["resolvers"] = (*options.get("resolvers", ()), _Before(self))
        return super().eval(expr, *arguments, **options)

    def _today(self, key: Any) -> Any:
        """Returns ``key``, a name or a list of names, in today's names."""
        names = key if isinstance(key, list) else [key]
        found = [today(name, self.columns) if isinstance(name, str) else name for name in names]
        for old, new in zip(names, found, strict=True):
            if old is not new:
                warnings.warn(moved(old, new), FutureWarning, stacklevel=3)
        return found if isinstance(key, list) else found[0]


class _Before(dict[str, Any]):
    """What an expression asks for when it names a column as before."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __missing__(self, key: str) -> Any:
        if today(key, self._frame.columns) == key:
            raise KeyError(key)
        return self._frame[key]
