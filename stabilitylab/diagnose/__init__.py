"""Diagnosis of recorded runs: the events of a run in their order, and the first difference of two. Needs no torch."""

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
