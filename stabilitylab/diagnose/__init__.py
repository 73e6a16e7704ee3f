"""After the fact: what happened in a run and in which order, and where two runs part. Needs no torch."""

from .compare import Comparison, compare
from .diagnosis import Diagnosis, diagnose
from .events import DETECTORS, Event, detector
from .standings import Standing, Standings, side_by_side

__all__ = [
    "DETECTORS",
    "Comparison",
    "Diagnosis",
    "Event",
    "Standing",
    "Standings",
    "compare",
    "detector",
    "diagnose",
    "side_by_side",
]
