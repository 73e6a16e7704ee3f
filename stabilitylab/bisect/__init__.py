"""The first sub-layer where two models, runs, precisions or devices part; calling the package is :func:`.find.bisect`.

``stabilitylab.bisect`` is the function and this package at once, as ``stabilitylab.lr_find`` is.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .differences import Gap, gap
from .judging import LIMIT, PlaceGap
from .prints import Fingerprint, PlacePrint
from .result import Bisection

__all__ = ["LIMIT", "Bisection", "Fingerprint", "Gap", "PlaceGap", "PlacePrint", "gap"]


class _Function(ModuleType):
    """The package, which can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from .find import bisect

        return bisect(*args, **options)

    @property
    def __signature__(self) -> Any:
        import inspect

        from .find import bisect

        return inspect.signature(bisect)


sys.modules[__name__].__class__ = _Function
