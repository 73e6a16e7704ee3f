"""The norms of the Jacobian of every LayerNorm: the factors by which it scales a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..probes import Site
from .initial_model import Filled, Hook, Subject, filled

COLUMNS = ("frobenius", "spectral", "input", "centred")
DEFINITION = """Norms of LN's Jacobian at gain 1, J = (I - 1 1^T / d - z z^T / d) / sigma with z the normalised token
and sigma^2 = Var_d + eps (RMSNorm: without 1 1^T, sigma^2 = mean square + eps), and L2 norms of the token that enters
(input) and of it without its mean over d (centred); means over real tokens. Where eps is negligible, spectral =
1 / sigma = sqrt(d) / centred. DeepNet, Sec. 3; Xiong et al. 2020."""


def jacobian_norms(x: Tensor, eps: float, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Return (Frobenius norm, spectral norm) of dLN(x)/dx at gain 1 and bias 0 for each token; x (..., D) -> (...).

    J is symmetric: 0 along 1, 1 / sigma in the d - 2 directions orthogonal to 1 and z, and eps / sigma^3 along z, the
    direction that normalising removes but for eps. Not ``centred`` (RMSNorm): 1 / sigma along 1 too.
    """
    across = x.shape[-1] - (2 if centred else 1)
    variance = x.var(dim=-1, correction=0) if centred else x.square().mean(dim=-1)
    sigma = (variance + eps).sqrt()
    along = eps / sigma.square()
    return (across + along.square()).sqrt() / sigma, (torch.ones_like(along) if across else along) / sigma


class Jacobians:
    """The Jacobian norms of every norm, from one forward pass."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._means: dict[Site, list[float]] = {}

    def hooks(self) -> Iterator[tuple[nn.Module, Hook]]:
        return ((site.module, partial(self._hear, site)) for site in self.sites)

    @property
    def sites(self) -> list[Site]:
        """The norms that divide by a statistic; DyT and Derf have no such Jacobian."""
        return [site for site in self._subject.sites.norms if isinstance(site.module, (nn.LayerNorm, nn.RMSNorm))]

    def _hear(self, site: Site, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = args[0][self._subject.real(site.stack)]  # (tokens, D)
        assert isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        assert module.eps is not None
        norms = jacobian_norms(x, module.eps, isinstance(module, nn.LayerNorm))
        lengths = x.norm(dim=-1), x.std(dim=-1, correction=0) * math.sqrt(x.shape[-1])
        self._means[site] = torch.stack((*norms, *lengths)).mean(dim=-1).tolist()

    def table(self) -> Filled:
        sites = self.sites
        columns = {column: [self._means[site][i] for site in sites] for i, column in enumerate(COLUMNS)}
        return filled(
            "ln_jacobian",
            [site.row for site in sites],
            columns,
            unit="norm",
            definition=DEFINITION,
            phase="forward",
            log=True,
            total="mean",
        )
