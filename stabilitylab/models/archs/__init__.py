"""One architecture a file: its formula, and all that defines it beside it."""

from __future__ import annotations

from .admin import Admin
from .base import ARCHS, Place, Residual, Trunk, arch, stack_archs, xavier_gain
from .branchnorm import BranchNorm
from .deepnorm import DeepNorm, deepnorm_constants, deepnorm_gain
from .dlcl import DLCL, DLCLPost
from .dsinit import DSInit, DSInitCode
from .layernorm_scaling import LayerNormScaling
from .normformer import NormFormer
from .postln import PostLN
from .postln_init import PostLNInit
from .preln import PreLN
from .resi_dual import ResiDual
from .rezero import ReZero
from .rfixup import RFixup
from .sandwich import PeriLN, Sandwich
from .subln import SubLN
from .tfixup import TFixup

__all__ = [
    "ARCHS",
    "DLCL",
    "Admin",
    "BranchNorm",
    "DLCLPost",
    "DSInit",
    "DSInitCode",
    "DeepNorm",
    "LayerNormScaling",
    "NormFormer",
    "PeriLN",
    "Place",
    "PostLN",
    "PostLNInit",
    "PreLN",
    "RFixup",
    "ReZero",
    "ResiDual",
    "Residual",
    "Sandwich",
    "SubLN",
    "TFixup",
    "Trunk",
    "arch",
    "deepnorm_constants",
    "deepnorm_gain",
    "stack_archs",
    "xavier_gain",
]
