"""What an architecture is asked: how each sub-layer joins the residual stream; and the registry of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from ...config import ModelConfig
from ...errors import UsageError
from ...registry import Registry, spelling
from ..schedules import Schedule
from ..sublayers import SubLayer


@dataclass(frozen=True)
class Place:
    """Where a sub-layer stands: all that an architecture may know of its model."""

    stack: str  # encoder | decoder
    layer: int  # from 1
    sublayer: str  # self_attn | cross_attn | ffn
    width: int
    encoder_layers: int
    decoder_layers: int

    @property
    def layers(self) -> int:
        return self.encoder_layers if self.stack == "encoder" else self.decoder_layers

    def __str__(self) -> str:
        return f"{self.stack}.{self.layer}.{self.sublayer}"


def xavier_gain(place: Place, matrix: str) -> float:
    """The base of all architectures: q, k, v as one fused (3d, d) Xavier matrix would have them."""
    return math.sqrt(0.5) if matrix in ("q", "k", "v") else 1.0


class Residual(nn.Module):
    """One sub-layer: F and its norm, joined to the stream by ``forward``; the rest are neutral answers of an arch.

    Every arch writes shortcut(s * x) + branch(F): one form, so that equal constants give equal bits.
    The identities are taps: ``shortcut`` carries s * x, ``branch`` carries F.
    """

    final_norm = False  # does each stack end with a norm of its own?
    takes_alpha = False  # does model.alpha replace a constant of this arch?
    scheduled = False  # does a Schedule drive it?
    needs_calibration = False  # does it need a calibration pass before step 0?

    def __init__(self, f: SubLayer, place: Place, *, alpha: float | None = None, schedule: Schedule | None = None):
        super().__init__()
        self.place = place
        self.f = f
        self.norm = nn.LayerNorm(place.width, eps=1e-5)
        self.shortcut = nn.Identity()
        self.branch = nn.Identity()

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:  # (B, T, D) -> (B, T, D)
        raise NotImplementedError

    def gain(self, matrix: str) -> float:
        """Initial gain of q, k, v, out, fc1 or fc2, as a multiple of Xavier's standard deviation."""
        return xavier_gain(self.place, matrix)

    @staticmethod
    def calibrating(residuals: Sequence[Any]) -> AbstractContextManager[None]:
        """Within it, one forward pass through these residuals of a stack sets what they calibrate."""
        return nullcontext()


class _Archs(Registry[type[Residual]]):
    def resolve(self, name: str) -> str:
        if spelling(name) == "mixnorm":
            raise UsageError(
                "no paper defines 'mixnorm': BranchNorm's Table 2 names it in one row and says nothing else about it; "
                f"choose one of {', '.join(sorted(self))}."
            )
        return super().resolve(name)


ARCHS = _Archs("architecture")
R = TypeVar("R", bound=type[Residual])


def arch(name: str) -> Callable[[R], R]:
    """Registers a residual as an architecture: ``@arch("name")``."""

    def decorate(entry: R) -> R:
        ARCHS.register(name)(entry)
        return entry

    return decorate


def stack_archs(config: ModelConfig) -> dict[str, type[Residual]]:
    """Stack -> its architecture; refuses a ``model.alpha`` that none of them has."""
    names = {
        "encoder-decoder": {"encoder": config.arch, "decoder": config.decoder_arch or config.arch},
        "encoder": {"encoder": config.arch},
        "decoder": {"decoder": config.arch},
    }[config.stack]
    archs = {stack: ARCHS[name] for stack, name in names.items()}
    if config.alpha is not None and not any(entry.takes_alpha for entry in archs.values()):
        have = ", ".join(name for name, entry in ARCHS.items() if entry.takes_alpha)
        raise UsageError(f"architecture {config.arch!r} has no alpha to replace: leave model.alpha out, or use {have}.")
    return archs
