"""Probes: measurements at places of a model, and their way to a sink. They need torch and numpy only.

An author of a probe reads ``base`` and ``rules``. ``library`` holds the probes, and ``places`` finds their sites.
"""

from ._engine.cadence import Cadence, CurvatureCadence, is_due
from ._engine.device_recorder import CudaGraphs, DeviceRecorder, attempt
from ._engine.evaluation import evaluation, random_states_kept
from ._engine.masks import Mask
from ._engine.options import AlphaSchedule, CurvatureBatch, Record, WatchOptions
from ._engine.row import Template
from ._engine.selection import Names, chosen, find_sites, split_sites
from ._engine.watchable import Optimizers
from .base import PROBES, Collected, CurvatureProbe, ParameterProbe, Probe, probe
from .parameters.sharing import SplitOver
from .places.sites import Site, Sites
from .rules import Cosine, Max, Mean, Norm, Quantile, Ratio, Rule, Sketch, Sum, Total
from .watcher import Watcher

__all__ = [
    "PROBES",
    "AlphaSchedule",
    "Cadence",
    "Collected",
    "Cosine",
    "CudaGraphs",
    "CurvatureBatch",
    "CurvatureCadence",
    "CurvatureProbe",
    "DeviceRecorder",
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
    "Record",
    "Rule",
    "Site",
    "Sites",
    "Sketch",
    "SplitOver",
    "Sum",
    "Template",
    "Total",
    "WatchOptions",
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
