"""Numbers of the forward pass: magnitudes at the norms, and how many activations are not zero."""

from __future__ import annotations

from typing import Any

import torch

from ..base import Numbers, Probe, probe, wide
from ..places.sites import TAPS, Site, activations, norms
from ..rules import Mean, Quantile

EPS = 0.01  # of a token's rms, under which an activation counts as off


@probe(
    "ln_input",
    on="forward",
    at=norms,
    unit="L2 norm per token",
    total="mean",
    columns={"value": Mean(), **{tap: Mean() for tap in TAPS}, "p99": Quantile("value", 0.99)},
    default=True,
    log=True,
)
class LNInput(Probe):
    """E_t ||x_t||_2 of what enters each norm (s x + alpha F in Post-LN) and its 99th percentile over tokens; apart from
    each other the branch E ||F||, as added E ||alpha F||, and the shortcut E ||s x||. DeepNet, Figs. 4b and 4c."""

    taps = TAPS
    together = True

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        return torch.linalg.vector_norm(y, dim=-1, dtype=wide(y))  # (B, T)

    def measure_together(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(values), dim=-1, dtype=wide(values[0]))  # (n, B, T)


@probe(
    "activation_sparsity",
    on="reference",
    at=activations,
    unit="share of entries",
    total="mean",
    columns={"nonzero_fraction": Mean(), "active_fraction": Mean()},
    default=True,
    log=False,
)
class ActivationSparsity(Probe):
    """Share of entries of what a feed-forward block's second linear sees, a routed expert's too; smaller is sparser.
    nonzero_fraction: those > 0, exact for ReLU (BranchNorm, Fig. 9; Li et al. 2022). active_fraction: those with
    |a| > 0.01 rms(a), rms over the token's entries, for smooth activations and products (GELU, SiLU, SwiGLU), never
    exactly 0 (Inferred)."""

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        bound = EPS * torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=wide(y)) / y.shape[-1] ** 0.5

        def share(chosen: torch.Tensor) -> torch.Tensor:
            return chosen.sum(dim=-1, dtype=torch.float32).double() / y.shape[-1]  # (B, T); exact below 2^24 entries

        return {"nonzero_fraction": share(y > 0), "active_fraction": share(y.abs() > bound)}
