"""Turns runs into figures, claims and a page. Nothing here needs torch."""

from .base import FIGURES, Figure, MissingRuns, Panel, Picture, Reference, Series, figure
from .claims import Effect, claim
from .collection import Record, Runs
from .statistics import Region

__all__ = [
    "FIGURES",
    "Effect",
    "Figure",
    "MissingRuns",
    "Panel",
    "Picture",
    "Record",
    "Reference",
    "Region",
    "Runs",
    "Series",
    "claim",
    "figure",
]
