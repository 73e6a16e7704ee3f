"""A table as a data frame in which the former names of columns still work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd

from .names import moved, today


class Frame(pd.DataFrame):
    """A pandas DataFrame in which former names of columns (:data:`stabilitylab.store.names.RENAMED`) still work, with a
    warning: ``stack`` means ``stack_name`` in ``[...]``, ``groupby`` and ``query``."""

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
        """Return ``key``, a name or a list of names, in today's names."""
        names = key if isinstance(key, list) else [key]
        found = [today(name, self.columns) if isinstance(name, str) else name for name in names]
        for old, new in zip(names, found, strict=True):
            if old is not new:
                warnings.warn(moved(old, new), FutureWarning, stacklevel=3)
        return found if isinstance(key, list) else found[0]


class _Before(dict[str, Any]):
    """The columns that an expression may name, former names included."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __missing__(self, key: str) -> Any:
        if today(key, self._frame.columns) == key:
            raise KeyError(key)
        return self._frame[key]
