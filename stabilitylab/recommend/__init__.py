"""Which architecture to use: cheap probes of all of them at one depth, a ranking by a fixed rule, and its check."""

from .columns import COLUMNS
from .measurement import Measurement, measure, measure_all
from .planning import Ask, Estimate, estimate, wanted
from .ranking import Ranked, ranking

__all__ = [
    "COLUMNS",
    "Ask",
    "Estimate",
    "Measurement",
    "Ranked",
    "estimate",
    "measure",
    "measure_all",
    "ranking",
    "wanted",
]
