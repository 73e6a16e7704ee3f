"""The growth of the residual stream with depth."""

from __future__ import annotations

from typing import Any

import torch

from ..base import Numbers, Probe, probe, variance, wide
from ..places.sites import Site, outputs, stream
from ..rules import Mean


@probe(
    "residual_norm",
    on="forward",
    at=stream,
    unit={"value": "L2 norm per token", "variance": "variance over d"},
    columns={"value": Mean(), "variance": Mean()},
    log=True,
)
class ResidualNorm(Probe):
    """The size of the residual stream x_l: ``value`` is ||x_l||_2 and ``variance`` is Var_d(x_l) (divided by d), mean
    over real tokens of the training pass. It is read where x_l enters each stack (layer 0) and where it leaves each
    sub-layer (or layer, where sub-layers are not known). Sun et al. 2025 (2502.05795: Curse of Depth); Kim et al. 2025
    (2502.02732: Peri-LN).

    Look at how the variance grows with l. If it grows exponentially, or past the variance that later branches add, deep
    Pre-LN layers turn into the identity. After each Post-LN it is flat by construction.

    Cost: a norm and a variance per sub-layer, in each forward of a probed row.
    """

    of_stream = True

    @property
    def together(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.keeps("variance")

    def measure_together(self, values: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(values), dim=-1, dtype=wide(values[0]))  # (n, B, T)

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        norm = torch.linalg.vector_norm(y, dim=-1, dtype=wide(y))  # (B, T)
        return {"value": norm, "variance": variance(y)} if self.keeps("variance") else norm


@probe("output_norm", on="reference", at=outputs, unit="L2 norm per token", columns={"value": Mean()}, log=False)
class OutputNorm(Probe):
    """The size ||F||_2 per token of each stack's output, its final norm included, mean over real tokens. The distance
    ||dF|| of ``model_update`` is relative to this size. It is sqrt(d) behind a LayerNorm with gain 1.

    Cost: one norm per stack in the reference pass.
    """

    of_stream = True

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        return torch.linalg.vector_norm(y, dim=-1, dtype=wide(y))  # (B, T)
