"""The growth of signals through the mixing matrices of models with several streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..base import Numbers, Probe, probe
from ..places.sites import Site, Sites
from ..rules import Mean


def mixings(sites: Sites) -> Sequence[Site]:
    """Return the taps ``mixing`` of the sub-layers: what carries n streams past each of them, (B, T, n n)."""
    found = [(path, module) for path, module in sites.modules.items() if path.rpartition(".")[2] == "mixing"]
    return [Site(path, module, *sites.place(path)) for path, module in found if isinstance(module, nn.Identity)]


@probe(
    "mixing_gain",
    on="reference",
    at=mixings,
    unit="gain",
    total="mean",
    columns={"forward": Mean(), "backward": Mean(), "own_forward": Mean(), "own_backward": Mean()},
    log=True,
)
class MixingGain(Probe):
    """The gain of H_l ... H_2 H_1, where H_l is the (n, n) matrix that carries n streams past sub-layer l of a stack.
    ``forward``: the largest of the absolute values of the product's row sums. ``backward``: the same for its column
    sums. ``own_forward`` and ``own_backward``: the same for H_l alone. All are means over real tokens. mHC, Xie et al.
    2025 (2512.24880), whose figures show the gain for Hyper-Connections and for mHC.

    The gain is the factor on a signal, or a gradient, that is equal in all streams. It bounds the growth of every
    signal only if the product has no negative entries, as in mHC. Entries of Hyper-Connections may be negative, and
    then cancel in a sum: [[1, -1], [-1, 1]] has gain 0, and doubles the signal (1, -1).

    Look for a forward or backward gain that grows with l. The gain is 1 at the start of Hyper-Connections, at most
    about 1.6 for mHC in its paper, and up to 3000 for that paper's Hyper-Connections of 27B. A matrix whose rows and
    columns sum to 1 keeps both gains at 1.

    Cost: a product of n by n matrices for each token and sub-layer of the reference pass.
    """

    def __init__(self) -> None:
        self._first: dict[str, Site] = {}
        self._composed: dict[str, torch.Tensor] = {}  # of the pass, by stack: (B, T, n, n)

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        n = math.isqrt(y.shape[-1])
        own = y.detach().double().unflatten(-1, (n, n))
        if self._first.setdefault(site.stack, site) is site:
            composed = own
        else:
            composed = own @ self._composed[site.stack]
        self._composed[site.stack] = composed
        return {
            "forward": largest_sum(composed, -1),
            "backward": largest_sum(composed, -2),
            "own_forward": largest_sum(own, -1),
            "own_backward": largest_sum(own, -2),
        }


def largest_sum(matrices: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the largest of the absolute values of the sums along ``axis``, in which signs cancel: (B, T)."""
    return matrices.sum(axis).abs().amax(-1)
