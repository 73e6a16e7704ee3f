"""Probes of the forward pass: the size of each norm's input, and the share of active feed-forward units."""

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
    """The size of each norm's input. ``value``: E_t ||x_t||_2, the mean over real tokens (in Post-LN, s x + alpha F
    enters the norm). ``p99``: the 99th percentile of ||x_t||_2 over tokens. It comes from a histogram and is off by up
    to 2.2 % (up to 41 % above 2^44), so it can lie below ``value`` if the tokens are nearly equal. Models that name
    these parts have three more columns: ``branch`` E ||F||, ``scaled_branch`` E ||alpha F|| (the branch as it is added)
    and ``shortcut`` E ||s x||. A norm above 1.8e19 is inf, since its square overflows float32. DeepNet, Figs. 4b and
    4c."""

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
    """The share of non-zero entries in the input of each feed-forward block's second linear, those of routed experts
    included; a smaller share is sparser. ``nonzero_fraction``: the share of entries > 0, exact for ReLU (BranchNorm,
    Fig. 9; Li et al. 2022). ``active_fraction``: the share of entries with |a| > 0.01 rms(a), where rms is taken over
    the entries of the token. It is for activations that are never exactly 0 (GELU, SiLU, SwiGLU), and our own
    definition (Inferred). Both are NaN if the norm of a real token's entries is not finite."""

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True, dtype=wide(y))  # (B, T, 1)
        bound = EPS * norm / y.shape[-1] ** 0.5
        lost = (norm - norm).squeeze(-1)  # NaN where the norm is not finite, else 0

        def share(chosen: torch.Tensor) -> torch.Tensor:
            counted = chosen.sum(dim=-1, dtype=torch.float32)  # (B, T); exact below 2^24 entries
            return counted.double() / y.shape[-1] + lost

        return {"nonzero_fraction": share(y > 0), "active_fraction": share(y.abs() > bound)}
