"""Forecasts of stability: cheap predictors, a small fit and its cover tell if a model trains at a depth, learning rate
and warm-up, and the highest stable rate."""

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
