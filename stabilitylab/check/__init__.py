"""Before you train: one forward, one backward and one update on a copy of a model, judged by stated bounds."""

from .bounds import BOUNDS, Bound
from .measure import preflight
from .result import Breach, Check, Preflight

__all__ = ["BOUNDS", "Bound", "Breach", "Check", "Finding", "Preflight", "preflight"]

Finding = Breach  # its name until 0.1
