"""After the fact: what happened in a run and in which order, and where two runs part. Needs no torch."""

from .compare import Comparison, compare
from .diagnosis import Diagnosis, diagnose
from .events import Event
from .standings import Standing, Standings, side_by_side

__all__ = ["Comparison", "Diagnosis", "Event", "Standing", "Standings", "compare", "diagnose", "side_by_side"]
