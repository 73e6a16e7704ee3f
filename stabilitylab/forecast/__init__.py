"""Will it train at this depth, rate and warm-up, and where is the edge? Cheap predictors, a small fit, its cover."""

from .fitting import Fitted, fitted
from .measuring import Measured, measure
from .subject import Subject, of_yours, reference
from .telling import Between, Forecast, forecast

__all__ = [
    "Between",
    "Fitted",
    "Forecast",
    "Measured",
    "Subject",
    "fitted",
    "forecast",
    "measure",
    "of_yours",
    "reference",
]
