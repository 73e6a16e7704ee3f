"""Probes: what is measured, where, and how it reaches a sink. Needs torch and numpy only."""

from . import activations, branches, gradients, representations, updates
from .base import PROBES, Max, Mean, Norm, ParameterProbe, Probe, Quantile, Ratio, Rule, Sum, Total, probe
from .schedule import is_due
from .sites import Site, Sites, find_sites
from .watcher import Watcher

__all__ = [
    "PROBES",
    "Max",
    "Mean",
    "Norm",
    "ParameterProbe",
    "Probe",
    "Quantile",
    "Ratio",
    "Rule",
    "Site",
    "Sites",
    "Sum",
    "Total",
    "Watcher",
    "activations",
    "branches",
    "find_sites",
    "gradients",
    "is_due",
    "probe",
    "representations",
    "updates",
]
