"""Probes: what is measured, where, and how it reaches a sink. Needs torch and numpy only.

``base`` and ``rules`` are what an author reads, ``library`` holds the probes, ``places`` says where they may look.
"""

from ._engine.cadence import Cadence, is_due
from ._engine.curvature_rows import CurvatureBatch, CurvatureCadence
from ._engine.evaluation import evaluation, random_states_kept
from ._engine.masks import Mask
from ._engine.recorder import CudaGraphs, Recorder, attempt
from ._engine.reference_rows import AlphaSchedule
from ._engine.row import Template
from ._engine.selection import Names, chosen, find_sites, split_sites
from ._engine.watchable import Optimizers
from .base import PROBES, Collected, CurvatureProbe, ParameterProbe, Probe, probe
from .places.sites import Site, Sites
from .rules import Max, Mean, Norm, Quantile, Ratio, Rule, Sum, Total
from .watcher import Watcher

__all__ = [
    "PROBES",
    "AlphaSchedule",
    "Cadence",
    "Collected",
    "CudaGraphs",
    "CurvatureBatch",
    "CurvatureCadence",
    "CurvatureProbe",
    "Mask",
    "Max",
    "Mean",
    "Names",
    "Norm",
    "Optimizers",
    "ParameterProbe",
    "Probe",
    "Quantile",
    "Ratio",
    "Recorder",
    "Rule",
    "Site",
    "Sites",
    "Sum",
    "Template",
    "Total",
    "Watcher",
    "attempt",
    "chosen",
    "evaluation",
    "find_sites",
    "is_due",
    "probe",
    "random_states_kept",
    "split_sites",
]
