"""What a probe is: numbers per place (``measure``), and the rules that turn them into the columns of a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch

from ..registry import Registry
from ..schema import Phase, Row, Table
from .places.sites import Site, Sites

if TYPE_CHECKING:
    from .parameters.pieces import Parameters

When = Literal["forward", "backward", "step", "update", "reference"]
Numbers = torch.Tensor | Mapping[str, torch.Tensor] | None


@dataclass(frozen=True)
class Rule:
    """How the raw numbers of many places and calls become one column: ``width`` additive float64 numbers a row.

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


class Probe:
    """A few numbers taken at places of a model: subclass it, decorate with :func:`probe`, write ``measure``.

    ``measure`` gets the input ``x`` of the site's module and the value ``y`` at the site (its output, or input, as
    ``site.take`` says); for ``on="backward"`` ``y`` is dE/d(that value) and ``x`` None. Device code only: no host read,
    no branch on data. Probes of parameters (step, update) are :class:`ParameterProbe`.
    """

    name: ClassVar[str]
    on: ClassVar[When]
    phase: ClassVar[Phase]
    at: ClassVar[Callable[[Sites], Sequence[Site]]]
    unit: ClassVar[str]  # all of them in words
    units: ClassVar[Mapping[str, str]]  # that of each column
    total: ClassVar[str]
    main: ClassVar[str]
    log: ClassVar[bool | None]
    columns: ClassVar[Mapping[str, Rule]]
    default: ClassVar[bool]
    undefined: ClassVar[frozenset[str]] = frozenset()  # columns where NaN or inf may just mean a division by 0
    taps: ClassVar[tuple[str, ...]] = ()  # taps of a site that are measured as well, each a raw number of its own
    waits: ClassVar[bool] = False  # does measuring make the host wait, so that it cannot be part of a CUDA graph?
    together: ClassVar[bool] = False  # is there a measure_together()?
    kept: tuple[str, ...] | None = None  # the only columns that this watcher records; None: all that fit

    def keeps(self, column: str) -> bool:
        return self.kept is None or column in self.kept

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        """Per-token numbers, shape of ``weight`` (bool, True on real tokens), or a 0-dim one; a dict for several; None
        where this call has nothing to measure."""
        raise NotImplementedError

    def measure_together(self, values: list[torch.Tensor]) -> torch.Tensor:
        """The numbers that ``measure`` makes of ``y`` alone, of values of one shape at once: (n, *tokens) or (n,)."""
        raise NotImplementedError

    def around(self, sites: Sequence[Site]) -> AbstractContextManager[Any]:
        """What a probe with ``on="reference"`` needs around each reference pass that is recorded."""
        return nullcontext()

    @classmethod
    def table(cls, rows: Sequence[Row], columns: Sequence[str]) -> Table:
        definition = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())  # the first paragraph
        main = cls.main if cls.main in columns else columns[0]
        return Table(
            cls.name,
            tuple(columns),
            tuple(rows),
            cls.units[main],
            definition,
            cls.total,
            phase=cls.phase,
            main=main,
            log=cls.log if main == cls.main else None,
            undefined=tuple(column for column in columns if column in cls.undefined),
        )


class ParameterProbe(Probe):
    """A probe of parameters: ``on="step"`` while gradients are there, ``on="update"`` around the optimizer's step."""

    def lacks(self, parameters: Parameters) -> str:
        """Why this model or optimizer has nothing to measure, as a verb and its object; empty if it has."""
        return "" if parameters.rows else "finds no parameters in this model"

    def rows(self, parameters: Parameters) -> Sequence[Row]:
        """The rows of the table: of all parameters, unless the probe has rows of its own."""
        return parameters.rows

    def fitting(self, parameters: Parameters) -> Sequence[str]:
        """The columns that this model's parameters can fill."""
        return tuple(self.columns)

    def before(self, parameters: Parameters) -> None:
        """Called at ``Watcher.step`` for ``on="update"``: keep what the measurement after the update needs."""

    def collect(self, parameters: Parameters) -> tuple[Mapping[str, torch.Tensor], np.ndarray]:
        """The additive numbers of each column, (rows, width) float64, and which cells exist, (rows, columns) bool.

        On several ranks they add up: ``parameters.squares`` and ``entries`` are weighted by ``parameters.weights``, so
        that what several ranks hold counts once; other sums must be.
        """
        raise NotImplementedError

    def metrics(self) -> Mapping[str, Total]:
        """Numbers about the whole model that the last ``collect`` came by."""
        return {}

    def pieces(self) -> Mapping[str, torch.Tensor]:
        """Of the last ``collect``, sums of squares of each piece of a parameter: "theta", "gradient" or "update"."""
        return {}


def wide(tensor: torch.Tensor) -> torch.dtype:
    """The type in which magnitudes of ``tensor`` are taken: float32, or its own where that is wider."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def variance(y: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, divided by its size; ``Tensor.var`` takes six times as long on a CPU."""
    y = y.to(wide(y))
    return (y - y.mean(dim=-1, keepdim=True)).square().mean(dim=-1)


PROBES: Registry[type[Probe]] = Registry("probe")
P = TypeVar("P", bound=Probe)


def probe(
    name: str,
    *,
    on: When,
    at: Callable[[Sites], Sequence[Site]] | None = None,
    unit: str | Mapping[str, str] = "",
    total: str = "",
    columns: Mapping[str, Rule] = MappingProxyType({"value": Mean()}),
    default: bool = False,
    main: str = "",
    log: bool | None = None,
    phase: Phase | None = None,
) -> Callable[[type[P]], type[P]]:
    """Registers a probe class: when (``on``) and where (``at``; not for probes of parameters) it measures, and the
    rules that make columns of its numbers, all of one ``unit`` or each of its own. ``total``, ``main`` and ``log`` as
    in :class:`Table`; ``default`` probes run unless left out.

    ``phase``, what the numbers depend on, follows from ``on``; of ``on="step"``, which sees parameters and gradients,
    it is "backward" unless said: "step" for one that looks at the parameters alone."""
    if unknown := [
        column for column in (main, *(() if isinstance(unit, str) else unit)) if column not in ("", *columns)
    ]:
        raise ValueError(f"probe {name!r} has no column {unknown[0]!r}; it has {', '.join(columns)}")

    def decorate(cls: type[P]) -> type[P]:
        cls.name, cls.on, cls.total, cls.columns, cls.default = name, on, total, columns, default
        cls.main, cls.log, cls.phase = main or next(iter(columns)), log, phase or ("backward" if on == "step" else on)
        cls.units = dict.fromkeys(columns, unit) if isinstance(unit, str) else {c: unit.get(c, "") for c in columns}
        cls.unit = "; ".join(dict.fromkeys(filter(None, cls.units.values())))
        cls.at = staticmethod(at or (lambda sites: ()))
        PROBES.register(name)(cls)
        return cls

    return decorate
