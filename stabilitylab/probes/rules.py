"""The rules that turn numbers of many places and calls into one column: what adds up, and how it is finished."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Rule:
    """The way of raw numbers of many places and calls into one column: ``width`` additive float64 numbers a row.

    ``of`` names the raw number that the column reads (its own name by default). Raw numbers are per token, shape of
    ``weight``, or 0-dim; ``add`` gets those of several rows stacked, (n, *tokens) or (n,), with ``weight`` (*tokens).
    """

    of: str = ""
    width: ClassVar[int] = 1
    additive: ClassVar[bool] = True

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        raise NotImplementedError

    def finish(self, parts: torch.Tensor) -> torch.Tensor:  # (rows, width) -> (rows,)
        raise NotImplementedError


EMPTY = 0x7FF8_0000_0E3B_0E3B  # the bits of a NaN that no arithmetic yields


@cache
def empty(device: torch.device) -> torch.Tensor:
    """A number that stands for no number, told from other NaN by its bits."""
    return torch.tensor(EMPTY, dtype=torch.int64, device=device).view(torch.float64)


@dataclass(frozen=True)
class Mean(Rule):
    """Mean over real tokens of all calls: sum and count. 0-dim numbers count once each."""

    width: ClassVar[int] = 2

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        if weight is None:
            total, count = values.double(), torch.ones((), dtype=torch.float64, device=values.device)
        else:
            tokens = tuple(range(1, values.dim()))
            # where, not a product: what padding holds may be NaN, and NaN * 0 is NaN
            total = torch.where(weight, values, 0).sum(tokens, dtype=torch.float64)
            count = weight.sum(dtype=torch.float64)
        into.index_add_(0, rows, torch.stack((total, count.expand_as(total)), dim=1))

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        # padding alone, say: a NaN of its own, which is read as nothing recorded
        return torch.where(parts[:, 1] == 0, empty(parts.device), parts[:, 0] / parts[:, 1])


@dataclass(frozen=True)
class Sum(Rule):
    """Sum over real tokens of all calls."""

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        if weight is not None:
            values = torch.where(weight, values, 0).sum(tuple(range(1, values.dim())), dtype=torch.float64)
        into.index_add_(0, rows, values.double()[:, None])

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return parts[:, 0]


@dataclass(frozen=True)
class Norm(Rule):
    """Root of the sum of squares over real tokens and all calls; in float64, 1e-38 and 1e38 keep their squares."""

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        squares = values.double().square()
        if weight is not None:
            squares = torch.where(weight, squares, 0).sum(tuple(range(1, values.dim())))
        into.index_add_(0, rows, squares[:, None])

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return parts[:, 0].sqrt()


@dataclass(frozen=True)
class Ratio(Rule):
    """Root of one sum of squares over another, as in ||a|| / ||b||; for probes of parameters, which sum themselves."""

    width: ClassVar[int] = 2

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return (parts[:, 0] / parts[:, 1]).sqrt()


@dataclass(frozen=True)
class Max(Rule):
    """Largest number over real tokens and all calls."""

    additive: ClassVar[bool] = False

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        if weight is not None:
            values = torch.where(weight, values, -torch.inf).amax(tuple(range(1, values.dim())))
        into[:, 0].scatter_reduce_(0, rows, values.double(), "amax")

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.where(parts[:, 0] == -torch.inf, empty(parts.device), parts[:, 0])  # of no token


@dataclass(frozen=True)
class Quantile(Rule):
    """Smallest number that a share ``q`` of the real tokens stay at or below, from a histogram: to within 2.2 %.

    Bins 2^(1/16) wide from 2^-20 to 2^44, of which the middle is reported; below counts as 0, above as inf. One NaN
    makes the quantile NaN.
    """

    q: float = 0.99
    low: ClassVar[int] = -20
    high: ClassVar[int] = 44
    per_octave: ClassVar[int] = 16
    width: ClassVar[int] = (high - low) * per_octave + 3  # below, the bins, above, NaN

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        above = self.width - 2
        place = ((values.log2() - self.low) * self.per_octave + 1).clamp(0, above).nan_to_num(nan=above + 1).long()
        counts = torch.ones_like(values, dtype=torch.float64) if weight is None else weight.double().expand_as(values)
        flat = rows.view(-1, *[1] * (values.dim() - 1)) * self.width + place
        into.view(-1).scatter_add_(0, flat.flatten(), counts.flatten())

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        reached = parts[:, :-1].cumsum(1)
        place = (reached < self.q * reached[:, -1:]).sum(1)
        middles = torch.exp2((place.double() - 0.5) / self.per_octave + self.low)
        middles = torch.where(place == 0, 0.0, torch.where(place >= self.width - 2, torch.inf, middles))
        none = torch.where(parts[:, -1] == 0, empty(parts.device), torch.nan)
        return torch.where((parts[:, -1] == 0) & (reached[:, -1] > 0), middles, none)


@dataclass(frozen=True)
class Total:
    """A number about the whole model as its additive ``parts``, (1, width): ranks add them up before it is finished."""

    rule: Rule
    parts: torch.Tensor

    def finish(self) -> torch.Tensor:  # 0-dim
        return self.rule.finish(self.parts)[0]
