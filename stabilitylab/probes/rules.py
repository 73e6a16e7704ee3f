"""The rules that turn the numbers of many places and calls into one column: how they add up, and the final formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from .splitmix import splitmix64


@dataclass(frozen=True)
class Rule:
    """The base class of rules. A rule reduces the raw numbers of many places and calls to one column, through ``width``
    additive float64 numbers per row.

    ``of`` names the raw number that the column reads (by default the column's own name). Raw numbers are per token, in
    the shape of ``weight``, or 0-dim. ``add`` gets the numbers of several rows stacked, (n, *tokens) or (n,), with
    ``weight`` of shape (*tokens).
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
    """Return the NaN that stands for "no number". Its bits differ from those of every computed NaN."""
    return torch.tensor(EMPTY, dtype=torch.int64, device=device).view(torch.float64)


@dataclass(frozen=True)
class Mean(Rule):
    """The mean over the real tokens of all calls. Each 0-dim number counts once."""

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
    """The sum over the real tokens of all calls."""

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        if weight is not None:
            values = torch.where(weight, values, 0).sum(tuple(range(1, values.dim())), dtype=torch.float64)
        into.index_add_(0, rows, values.double()[:, None])

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return parts[:, 0]


@dataclass(frozen=True)
class Norm(Rule):
    """The root of the sum of squares over the real tokens of all calls. It is computed in float64, where the squares of
    1e-38 and 1e38 become neither 0 nor inf."""

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        squares = values.double().square()
        if weight is not None:
            squares = torch.where(weight, squares, 0).sum(tuple(range(1, values.dim())))
        into.index_add_(0, rows, squares[:, None])

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return parts[:, 0].sqrt()


@dataclass(frozen=True)
class Ratio(Rule):
    """The root of the ratio of two sums of squares, as in ||a|| / ||b||. It is for probes of parameters, which compute
    the sums themselves."""

    width: ClassVar[int] = 2

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return (parts[:, 0] / parts[:, 1]).sqrt()


@dataclass(frozen=True)
class Cosine(Rule):
    """The cosine <a, b> / (||a|| ||b||) from the three sums <a, b>, ||a||^2 and ||b||^2. It is for probes of
    parameters, which compute the sums themselves."""

    width: ClassVar[int] = 3

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return parts[:, 0] / (parts[:, 1].sqrt() * parts[:, 2].sqrt())


@dataclass(frozen=True)
class Max(Rule):
    """The largest number over the real tokens of all calls."""

    additive: ClassVar[bool] = False

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        if not values.numel():
            return  # an expert that got no token
        if weight is not None:
            values = torch.where(weight, values, -torch.inf).amax(tuple(range(1, values.dim())))
        into[:, 0].scatter_reduce_(0, rows, values.double(), "amax")

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        return torch.where(parts[:, 0] == -torch.inf, empty(parts.device), parts[:, 0])  # of no token


@dataclass(frozen=True)
class Quantile(Rule):
    """The smallest number that is not exceeded on a share ``q`` of the real tokens. It comes from a histogram, to
    within 2.2 %, or 41 % above 2^44.

    The bins are 2^(1/16) wide and reach from 2^-20 to 2^44; from there to 2^128 they are an octave wide. The middle of
    a bin is reported; smaller numbers count as 0, larger ones as inf. One NaN makes the quantile NaN.
    """

    q: float = 0.99
    low: ClassVar[int] = -20
    high: ClassVar[int] = 44
    top: ClassVar[int] = 128
    per_octave: ClassVar[int] = 16
    wide: ClassVar[int] = (high - low) * per_octave + 1  # the first bin of an octave
    width: ClassVar[int] = wide + top - high + 2  # below, the bins, above, NaN

    def add(self, into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None) -> None:
        above = self.width - 2
        octave = values.log2()
        place = torch.where(
            octave < self.high, (octave - self.low) * self.per_octave + 1, octave + (self.wide - self.high)
        )
        place = place.clamp(0, above).nan_to_num(nan=above + 1).long()
        counts = torch.ones_like(values, dtype=torch.float64) if weight is None else weight.double().expand_as(values)
        flat = rows.view(-1, *[1] * (values.dim() - 1)) * self.width + place
        into.view(-1).scatter_add_(0, flat.flatten(), counts.flatten())

    def finish(self, parts: torch.Tensor) -> torch.Tensor:
        reached = parts[:, :-1].long().cumsum(1).double()  # CUDA has no deterministic one of floating-point numbers
        place = (reached < self.q * reached[:, -1:]).sum(1)
        fine = (place.double() - 0.5) / self.per_octave + self.low
        middles = torch.exp2(torch.where(place < self.wide, fine, place.double() + (0.5 + self.high - self.wide)))
        middles = torch.where(place == 0, 0.0, torch.where(place >= self.width - 2, torch.inf, middles))
        none = torch.where(parts[:, -1] == 0, empty(parts.device), torch.nan)
        return torch.where((parts[:, -1] == 0) & (reached[:, -1] > 0), middles, none)


ROWS, FEATURES = 0, 1  # the two streams of signs
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}  # entries that are widened to float64 at a time: a cache full on a CPU
LEAST_ROWS = 64  # at a time: the signs of a wide tensor's features are read once for them


@dataclass(frozen=True)
class Sketch:
    r"""The ``k`` sums of a tensor's entries with random signs, one column each: z_j = sum_{i,f} r_j(i) c_j(f) x_{i,f}.

    E z_j^2 = ||x||_F^2, and the sums are linear: the sums of two tensors differ by the sums of their difference. So
    mean_j (z_j - z'_j)^2 estimates ||x - x'||_F^2 without bias (Alon, Matias, Szegedy 1996). The relative standard
    error of this estimate is at most sqrt(8 / k), for a difference of rank one, and about sqrt(2 / k) for a difference
    without structure.

    The sign r_j(i) is bit j of splitmix64 of the logical index i of a row (a token, or an output of a weight). The sign
    c_j(f) is bit j of another stream at the feature f. Since signs depend on indices alone, the sums of the parts of a
    tensor add up to the sums of the whole. They do not depend on the name of the place, so two implementations can be
    compared. Equal tensors have equal sums, on a GPU too. (A CountSketch also reads each entry once, but it scatters,
    in an order that a GPU does not repeat.)

    ``columns`` are the rules of the k columns; :meth:`sums` computes the numbers, in float64. ``k``: 1 to 64.
    """

    k: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 64:
            raise ValueError(f"a Sketch has 1 to 64 sums, not {self.k}.")

    @property
    def columns(self) -> Mapping[str, Rule]:
        return {f"s{number}": Sum() for number in range(self.k)}

    def signs(self, index: torch.Tensor, stream: int) -> torch.Tensor:  # (n,) int64 -> (n, k) float64
        """Return the signs (-1 or 1) of logical indices: splitmix64's number index + 1 in a ``stream``'s sequence."""
        bits = (splitmix64(index + (stream << 60))[:, None] >> torch.arange(self.k, device=index.device)) & 1
        return 1.0 - 2.0 * bits.double()

    def signs_of_range(self, count: int, device: torch.device, first: int = 0) -> torch.Tensor:  # (count, k) float64
        """Return the signs of ``count`` rows that are numbered from ``first``. The result is cached."""
        return _signs_of_range(self, first, count, ROWS, device)

    def sums(self, values: torch.Tensor, rows: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the k sums of ``values`` (n, d), as (k,) float64. ``rows``: the logical indices of the rows, (n,). The
        features are numbered from ``first``."""
        return self.sums_and_square(values, self.signs(rows, ROWS), first=first)[0]

    def sums_and_square(
        self,
        values: torch.Tensor,
        signs: torch.Tensor,
        counted: torch.Tensor | None = None,
        first: int = 0,
        eps: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k sums of ``values`` (n, d), as (k,), and ||values||_F^2, 0-dim. Both come from one float64 copy
        of a bounded part at a time.

        ``signs``: the signs of the rows, (n, k). ``counted``: (n,), False for rows that are left out, whatever they
        contain. ``eps``: read x / (|x| + eps) in place of each entry x; None: read x.
        """
        columns = _signs_of_range(self, first, values.shape[1], FEATURES, values.device)
        sums = torch.zeros(self.k, dtype=torch.float64, device=values.device)
        square = torch.zeros((), dtype=torch.float64, device=values.device)
        step = max(LEAST_ROWS, CHUNK.get(values.device.type, CHUNK["cuda"]) // max(1, values.shape[1]))
        room = torch.empty((min(step, len(values)), values.shape[1]), dtype=torch.float64, device=values.device)
        for start in range(0, len(values), step):
            part = slice(start, start + step)
            wide = room[: len(values[part])].copy_(values[part])
            if eps is not None:
                wide.div_(wide.abs().add_(eps))
            products, squares = wide @ columns, torch.linalg.vector_norm(wide, dim=1).square()
            if counted is not None:
                products = torch.where(counted[part, None], products, 0)
                squares = torch.where(counted[part], squares, 0)
            sums += (products * signs[part]).sum(0)
            square += squares.sum()
        return sums, square


@cache
def _signs_of_range(sketch: Sketch, first: int, count: int, stream: int, device: torch.device) -> torch.Tensor:
    return sketch.signs(torch.arange(first, first + count, device=device), stream)


@dataclass(frozen=True)
class Total:
    """A number about the whole model, as its additive ``parts`` of shape (1, width). Ranks add the parts up before it
    is finished."""

    rule: Rule
    parts: torch.Tensor

    def finish(self) -> torch.Tensor:  # 0-dim
        return self.rule.finish(self.parts)[0]
