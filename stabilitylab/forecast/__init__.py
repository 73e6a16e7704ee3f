"""Will it train at this depth, rate and warm-up, and where is the edge? Cheap predictors, a small fit, its cover."""

from .candidate import Candidate, of_yours, reference
from .fitting import Fitted, fitted
from .known import Known, KnownEdges, known_edges
from .measuring import Measured, measure
from .planning import Ask, Estimate, estimate, wanted
from .telling import Between, Forecast, forecast

__all__ = [
    "Ask",
    "Between",
    "Candidate",
    "Estimate",
    "Fitted",
    "Forecast",
    "Known",
    "KnownEdges",
    "Measured",
    "estimate",
    "fitted",
    "forecast",
    "known_edges",
    "measure",
    "of_yours",
    "reference",
    "wanted",
]
