"""One architecture a file: its formula, and all that defines it beside it."""

from __future__ import annotations

from .admin import Admin
from .base import ARCHS, Place, Residual, arch, stack_archs, xavier_gain
from .branchnorm import BranchNorm
from .deepnorm import DeepNorm, deepnorm_constants, deepnorm_gain
from .postln import PostLN
from .postln_init import PostLNInit
from .preln import PreLN

__all__ = [
    "ARCHS",
    "Admin",
    "BranchNorm",
    "DeepNorm",
    "Place",
    "PostLN",
    "PostLNInit",
    "PreLN",
    "Residual",
    "arch",
    "deepnorm_constants",
    "deepnorm_gain",
    "stack_archs",
    "xavier_gain",
]
