"""The first sub-layer where two models, runs, precisions or devices part; calling the package is
:func:`.find.bisect`."""

from __future__ import annotations

from ..callable_package import make_callable
from .differences import Gap, gap
from .judging import LIMIT, PlaceGap
from .prints import Fingerprint, PlacePrint
from .result import Bisection

__all__ = ["LIMIT", "Bisection", "Fingerprint", "Gap", "PlaceGap", "PlacePrint", "gap"]

make_callable(__name__, "find")
