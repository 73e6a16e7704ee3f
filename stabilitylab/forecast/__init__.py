"""Will it train at this depth, rate and warm-up, and where is the edge? Cheap predictors, a small fit, its cover."""

from .fitting import Fitted, fitted
from .measuring import Measured, measure
from .planning import Ask, Estimate, estimate, wanted
from .subject import Subject, of_yours, reference
from .telling import Between, Forecast, forecast

__all__ = [
    "Ask",
    "Between",
    "Estimate",
    "Fitted",
    "Forecast",
    "Measured",
    "Subject",
    "estimate",
    "fitted",
    "forecast",
    "measure",
    "of_yours",
    "reference",
    "wanted",
]
