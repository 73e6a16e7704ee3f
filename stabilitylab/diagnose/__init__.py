"""After the fact: what happened in a run and in which order, and where two runs part. Needs no torch."""

from .compare import Comparison, compare
from .diagnosis import Diagnosis, diagnose
from .events import Event

__all__ = ["Comparison", "Diagnosis", "Event", "compare", "diagnose"]
