"""Outliers: single entries far above the rest, which low precision must represent and attention sinks rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..base import Numbers, Probe, probe, wide
from ..places.sites import Site, Sites
from ..rules import Max, Mean


def hidden(sites: Sites) -> Sequence[Site]:
    """Return the output of each layer, then that of each feed-forward activation."""
    return (*sites.layers, *sites.activations, *sites.shown("stream"), *sites.shown("activations"))


@probe(
    "outliers",
    on="reference",
    at=hidden,
    unit={"pearson_kurtosis": "ratio", "max_abs": "units of x", "max_over_rms": "ratio", "max_over_median": "ratio"},
    columns={"pearson_kurtosis": Mean(), "max_abs": Max(), "max_over_rms": Max(), "max_over_median": Max()},
    log=True,
)
class Outliers(Probe):
    """The size of single entries x relative to the other entries of their token, in each layer's output and each
    feed-forward activation. ``pearson_kurtosis``: E_d[(x - mu)^4] / E_d[(x - mu)^2]^2 over the d entries of a token,
    mean over real tokens (3 for a Gaussian, d if one entry holds everything, 0 if all are equal). ``max_abs``: the
    largest |x|. ``max_over_rms``, ``max_over_median``: a token's largest |x| over the rms and over the median |x| of
    the same token, the largest over real tokens. The median is not taken after activations, where it may be 0. Sun et
    al. 2024 (2402.17762: massive activations, |x| > 100 and over 1000 medians).

    Look for a kurtosis that grows with depth or from row to row (fp8 and int8 lose the small entries), and for a layer
    from which max_over_median jumps by orders of magnitude. A max_abs near 65504 is about to overflow in fp16. The
    paper takes the median of the whole sequence; here it is the token's own.

    Cost: about ten elementwise operators and a median of each layer's output, in the reference pass.
    """

    of_stream = True
    undefined = frozenset({"max_over_rms", "max_over_median"})  # of a token that is all 0, or mostly

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        y = y.to(wide(y))  # (B, T, D)
        size = y.abs()
        largest = size.amax(-1)
        numbers = {
            "pearson_kurtosis": kurtosis(y),
            "max_abs": largest,
            "max_over_rms": largest / y.square().mean(-1).sqrt(),
        }
        if not site.sublayer:  # a layer
            numbers["max_over_median"] = largest / size.median(-1).values
        return numbers


def kurtosis(y: torch.Tensor) -> torch.Tensor:
    """Return the kurtosis over the last dimension: (..., D) -> (...)."""
    off = y - y.mean(-1, keepdim=True)
    largest = off.abs().amax(-1, keepdim=True)
    squares = (off / torch.where(largest == 0, 1, largest)).square()  # scaled: fourth powers of 1e-12 are 0 in float32
    variance = squares.mean(-1)
    return torch.where(variance == 0, 0, squares.square().mean(-1) / variance.square())
