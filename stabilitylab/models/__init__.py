"""The reference Transformer and the architectures of its residuals."""

from __future__ import annotations

from .archs.deepnorm import deepnorm_constants
from .base import ARCHS, ArchOptions, Place, Residual, Trunk, arch
from .build import build_model, canonical, configure, parameter_count
from .schedules import Schedule
from .transformer import Stack, Transformer

__all__ = [
    "ARCHS",
    "ArchOptions",
    "Place",
    "Residual",
    "Schedule",
    "Stack",
    "Transformer",
    "Trunk",
    "arch",
    "build_model",
    "canonical",
    "configure",
    "deepnorm_constants",
    "parameter_count",
]
