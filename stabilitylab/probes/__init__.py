"""Probes: what is measured, where, and how it reaches a sink. Needs torch and numpy only."""

from ._engine.cadence import is_due
from ._engine.record import Template
from ._engine.recorder import CudaGraphs, Recorder
from .base import PROBES, Max, Mean, Norm, ParameterProbe, Probe, Quantile, Ratio, Rule, Sum, Total, probe
from .library import (
    activations,
    adam,
    attention,
    branches,
    gains,
    gradients,
    logits,
    outliers,
    rank,
    representations,
    residual,
    updates,
)
from .places.finding import find_sites
from .places.sites import Site, Sites
from .watcher import Watcher

__all__ = [
    "PROBES",
    "CudaGraphs",
    "Max",
    "Mean",
    "Norm",
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
    "activations",
    "adam",
    "attention",
    "branches",
    "find_sites",
    "gains",
    "gradients",
    "is_due",
    "logits",
    "outliers",
    "probe",
    "rank",
    "representations",
    "residual",
    "updates",
]
