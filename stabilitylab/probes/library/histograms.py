"""Histograms of every parameter, its gradient and its update, and of the activations of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...histograms import COLUMNS, HIGH, LOW, NONFINITE, ZERO
from ...schema import Row
from ..base import Collected, Numbers, ParameterProbe, Probe, probe, wide
from ..parameters.copies import kept, parts
from ..parameters.pieces import Parameters
from ..parameters.squares import CHUNK, is_counted
from ..places.sites import Site, Sites
from ..rules import Rule, Sum

UNSEEN = len(COLUMNS)  # the place of entries that do not count: padding


@dataclass(frozen=True)
class Count(Sum):
    """Sum of counts; a whole number again, where ranks added the shares of entries that several of them hold."""

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return super().finish(parts).round()


def hidden_by_layer(sites: Sites) -> Sequence[Site]:
    """Return the feed-forward activations and the output of each layer, layer by layer: the rows of a pipeline's stages
    then stand as those of one process."""
    order = {stack.name: rank for rank, stack in enumerate(sites.stacks)}
    found = sorted(
        (*sites.activations, *sites.layers), key=lambda site: (order.get(site.stack, len(order)), site.layer)
    )
    return (*found, *sites.shown("stream"), *sites.shown("activations"))


BINS: Mapping[str, Rule] = dict.fromkeys(COLUMNS, Count())
_table = partial(probe, unit="entries", columns=BINS, main="zero", log=False)


class _OfParameters(ParameterProbe):
    """Histograms of one tensor for every single parameter."""

    by_name = True

    def rows(self, parameters: Parameters) -> Sequence[Row]:
        return parameters.each

    def collected(self, parameters: Parameters, counted: Mapping[int, torch.Tensor]) -> Collected:
        """Return the histograms of a row. ``counted``: index of a parameter -> its counts, (bins,)."""
        nothing = torch.zeros(len(COLUMNS), dtype=torch.float64, device=parameters.device)
        shares = parameters.shares
        grid = torch.stack([counted[at] * share if at in counted else nothing for at, share in enumerate(shares)])
        seen = np.isin(np.arange(len(shares)), list(counted))
        columns = {column: grid[:, at : at + 1] for at, column in enumerate(COLUMNS)}
        return Collected(columns, np.repeat(seen[:, None], len(COLUMNS), axis=1))


@_table("histograms", on="step", phase="step")
class Histograms(_OfParameters):
    """The number of entries of every single parameter theta_t, by sign and size. ``+2^n`` and ``-2^n`` count positive
    and negative entries with 2^n <= |x| < 2^(n+1), for n from -64 to 15. ``below`` and ``above``, with their signs,
    count entries that are smaller or larger. ``zero`` counts exact zeros, ``nonfinite`` counts NaN and inf. The edges
    are exact in every dtype. Our definition: the bins are fixed, so that counts of steps, runs, shards and
    micro-batches can be added and compared.

    Look for a matrix whose sizes drift apart from those of its neighbours, for a growing share of exact zeros, and for
    a gradient that has moved below 2^-27 (Adam's eps of 1e-8) or, in fp16, below 2^-24.

    This probe brings ``histograms_gradient``, ``histograms_update`` and ``histograms_activation`` with it. The group
    "all" does not include these four.

    Cost: ten elementwise operators and a scattered sum over all entries of a probed row, a few million entries at a
    time; 166 numbers (1,328 bytes before compression) per parameter and row.
    """

    brings = ("histograms_gradient", "histograms_update", "histograms_activation")

    def collect(self, parameters: Parameters) -> Collected:
        return self.collected(parameters, _each(parameters.tensors))


@_table("histograms_gradient", on="step")
class HistogramsGradient(_OfParameters):
    """The counts of ``histograms`` for the gradient of every single parameter, before clipping. A parameter without a
    gradient is absent. Entries that a sparse gradient does not store count as exact zeros.

    Cost: the cost of ``histograms``.
    """

    def collect(self, parameters: Parameters) -> Collected:
        return self.collected(parameters, _each(parameters.gradients()))


@_table("histograms_update", on="update")
class HistogramsUpdate(_OfParameters):
    """The counts of ``histograms`` for the update theta_{t+1} - theta_t of every single parameter, in the parameter's
    own dtype. Look for a bf16 weight with an update that is mostly exact zeros: its steps are lost in rounding.

    Cost: the cost of ``histograms``, and a copy of the parameters.
    """

    def __init__(self) -> None:
        self._theta: list[torch.Tensor] = []

    def before(self, parameters: Parameters) -> None:
        self._theta = kept(parameters.tensors, self._theta)

    def collect(self, parameters: Parameters) -> Collected:
        counted: dict[int, torch.Tensor] = {}
        now = parameters.tensors
        for part in parts(self._theta, parameters.device):
            pairs = [(at, old) for at, old in enumerate(part) if old is not None and is_counted(now[at])]
            counted |= {at: counts(now[at] - old) for at, old in pairs}
        return self.collected(parameters, counted)


@_table("histograms_activation", on="forward", at=hidden_by_layer)
class HistogramsActivation(Probe):
    """The counts of ``histograms`` for the entries of each layer's output and of the input of each feed-forward block's
    second linear: real tokens of all micro-batches of the row, in the training forward.

    Cost: the cost of ``histograms`` over these activations, in each forward of a probed row, and about four operators
    per column to add all places up.
    """

    by_name = True
    of_stream = True

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        return dict(zip(COLUMNS, counts(y, weight).unbind(), strict=True))


def _each(values: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    return {at: counts(value) for at, value in enumerate(values) if is_counted(value)}


def counts(values: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Return how many entries fall into each of ``COLUMNS``, float64; ``real``: True on the tokens that count, shape of
    ``values`` without its last dimension. A complex number counts as two."""
    values, left_out = values.detach(), 0
    if values.is_sparse:
        stored = values.coalesce().values()
        values, left_out = stored, values.numel() - stored.numel()
    if values.is_complex():
        values, left_out = torch.view_as_real(values), 2 * left_out
    masked = real is not None and real.dim() > 0
    rows = values.reshape(-1, values.shape[-1] if masked else 1)
    found = torch.zeros(len(COLUMNS) + 1, dtype=torch.int64, device=values.device)
    one = torch.ones((), dtype=torch.int64, device=values.device)
    step = max(1, CHUNK.get(values.device.type, CHUNK["cuda"]) // max(1, rows.shape[1]))
    tokens = real.reshape(-1, 1).split(step) if masked and real is not None else None
    for number, part in enumerate(rows.split(step)):
        place = _places(part.to(wide(part)))
        place = place if tokens is None else torch.where(tokens[number], place, UNSEEN)
        place = place.reshape(-1).long()
        found.scatter_add_(0, place, one.expand_as(place))
    found[ZERO] += left_out
    return found[:UNSEEN].double()


def _places(values: torch.Tensor) -> torch.Tensor:
    """Return the number of each entry's column; int32."""
    exponent = torch.frexp(values).exponent  # 2^(exponent - 1) <= |x| < 2^exponent
    size = (exponent - LOW).clamp(0, HIGH - LOW + 1)
    place = torch.where(values < 0, ZERO - 1 - size, ZERO + 1 + size)
    place = torch.where(values == 0, ZERO, place)
    return torch.where(values.isfinite(), place, NONFINITE)
