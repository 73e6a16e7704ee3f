"""The best and the largest safe learning rate of a model, by trials; calling the package is :func:`.find.lr_find`.

``stabilitylab.lr_find`` is the function and this package at once: Python binds a package that was imported to its name,
so that the package itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .search import Choice, RateResult, RateTrial, RateTrials, Rungs, choose

__all__ = ["Choice", "RateResult", "RateTrial", "RateTrials", "Rungs", "choose"]


class _Function(ModuleType):
    """The package, which can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from .find import lr_find

        return lr_find(*args, **options)

    @property
    def __signature__(self) -> Any:
        import inspect

        from .find import lr_find

        return inspect.signature(lr_find)


sys.modules[__name__].__class__ = _Function
