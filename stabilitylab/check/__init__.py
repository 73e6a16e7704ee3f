"""Before you train: one forward, one backward and one update on a copy of a model, judged by stated bounds."""

from .bounds import BOUNDS, Bound
from .measure import preflight
from .result import Finding, Preflight

__all__ = ["BOUNDS", "Bound", "Finding", "Preflight", "preflight"]
