"""Measurements at the initialisation and after one tiny update, in float64, as an ordinary run directory of kind
"onestep"."""

from .measurement import measure
from .workers import measure_all

__all__ = ["measure", "measure_all"]
