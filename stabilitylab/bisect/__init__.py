"""The search for the first sub-layer where two models, runs, precisions or devices differ. Calling the package calls
:func:`.find.bisect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..callable_package import make_callable
from ..late_names import late_names
from .differences import Gap, gap
from .judging import LIMIT, PlaceGap
from .prints import Fingerprint, PlacePrint
from .result import Bisection

if TYPE_CHECKING:
    from .forcing import values_of
    from .model_pass import fingerprint_of
    from .rounding import redrawn
    from .stored import of_stored

_HOME = {"fingerprint_of": "model_pass", "of_stored": "stored", "redrawn": "rounding", "values_of": "forcing"}

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


__getattr__ = late_names(__name__, _HOME)
make_callable(__name__, "find")
