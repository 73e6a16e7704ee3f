"""The first sub-layer where two models, runs, precisions or devices part; calling the package is
:func:`.find.bisect`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..callable_package import make_callable
from .differences import Gap, gap
from .judging import LIMIT, PlaceGap
from .prints import Fingerprint, PlacePrint
from .result import Bisection

if TYPE_CHECKING:
    from .forcing import values_of
    from .model_pass import fingerprint_of
    from .rounding import redrawn
    from .stored import of_stored

_HOME = {
    **{"fingerprint_of": "model_pass", "redrawn": "rounding", "values_of": "forcing"},  # need torch
    "of_stored": "stored",
}

__all__ = [
    "LIMIT",
    "Bisection",
    "Fingerprint",
    "Gap",
    "PlaceGap",
    "PlacePrint",
    "fingerprint_of",
    "gap",
    "of_stored",
    "redrawn",
    "values_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stabilitylab.bisect' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


make_callable(__name__, "find")
