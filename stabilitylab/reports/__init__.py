"""Turns runs into figures, claims and a page. Nothing here needs torch.

Public beside these names: :mod:`.statistics` (intervals over seeds), :mod:`.arrange` and :mod:`.style` (what panels
share, titles, colours) and :mod:`.paper` (pictures as files).
"""

from .base import (
    ABSENT,
    DIVERGED,
    FIGURES,
    NONFINITE,
    STUCK,
    ZERO,
    Figure,
    Map,
    MissingRuns,
    Panel,
    Picture,
    Reference,
    Series,
    figure,
)
from .claims import CLAIMS, Effect, Share, claim, judge
from .collection import Record, Runs
from .statistics import Region

__all__ = [
    "ABSENT",
    "CLAIMS",
    "DIVERGED",
    "FIGURES",
    "NONFINITE",
    "STUCK",
    "ZERO",
    "Effect",
    "Figure",
    "Map",
    "MissingRuns",
    "Panel",
    "Picture",
    "Record",
    "Reference",
    "Region",
    "Runs",
    "Series",
    "Share",
    "claim",
    "figure",
    "judge",
]
