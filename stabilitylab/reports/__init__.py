"""Runs to figures, claims and a page. Nothing here needs torch."""

from .base import FIGURES, Figure, MissingRuns, Panel, Picture, Reference, Series, figure
from .collection import Record, Runs

__all__ = [
    "FIGURES",
    "Figure",
    "MissingRuns",
    "Panel",
    "Picture",
    "Record",
    "Reference",
    "Runs",
    "Series",
    "figure",
]
