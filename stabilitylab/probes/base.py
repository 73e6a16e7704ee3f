"""The probe: numbers per place (``measure``), and the rules that turn them into the columns of a table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import torch

from ..registry import Registry, Room
from ..schema import Phase, Row, Table
from .parameters.layouts import BatchPart
from .places.sites import Site, Sites
from .rules import Mean, Rule, Total

if TYPE_CHECKING:
    from .curvature.landscape import Landscape
    from .parameters.pieces import Parameters

When = Literal["forward", "backward", "step", "update", "reference", "curvature"]
Numbers = torch.Tensor | Mapping[str, torch.Tensor] | None


class Collected(NamedTuple):
    """The findings of a probe of parameters at one row."""

    columns: Mapping[str, torch.Tensor]  # the additive numbers of each column: (rows, width) float64
    seen: np.ndarray  # which cells exist: (rows, columns) bool
    metrics: Mapping[str, Total] = MappingProxyType({})  # numbers about the whole model
    pieces: Mapping[str, torch.Tensor] = MappingProxyType({})  # "theta", "gradient", "update": squares of each piece


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
    heads: ClassVar[bool] = False  # do numbers have a first dimension of heads, each of which has a row of its own?
    in_step: ClassVar[bool] = False  # on="step": does it take what an optimizer sums in its step (Parameters.in_step)?
    in_one_process: ClassVar[bool] = False  # is it taken in a single process alone?
    in_one_stage: ClassVar[bool] = False  # is it refused where a pipeline, or code of the caller's, splits the model?
    by_name: ClassVar[bool] = False  # is it taken where its name is given, and not with "all"?
    brings: ClassVar[tuple[str, ...]] = ()  # probes that come with it where it is asked for by name
    awake: bool = True  # is the coming row probed?
    missed: dict[str, str]  # site -> why it has no number
    # numbers of the heads that this rank has at a site, (heads, ...) -> those of all ranks, if it is tensor parallel
    all_heads: Callable[[Site, torch.Tensor], torch.Tensor] = staticmethod(lambda site, numbers: numbers)
    of_batch: BatchPart = BatchPart()  # the part of each batch that this rank works on
    kept: tuple[str, ...] | None = None  # the only columns that this watcher records; None: all that fit

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        made.missed = {}  # whatever an author's __init__ does
        return made

    def keeps(self, column: str) -> bool:
        return self.kept is None or column in self.kept

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        """Per-token numbers, shape of ``weight`` (bool, True on real tokens), or a 0-dim one; a dict for several; None
        where this call has nothing to measure."""
        raise NotImplementedError

    def unmeasured(self, device: torch.device) -> Numbers:
        """The numbers of a call whose value cannot be read, which say so; None: the cell stays empty, as if the place
        were never reached."""
        return None

    def over_heads(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of a module, made of those of its heads, (heads, ...): the largest."""
        return numbers.amax(0)

    def measure_together(self, values: list[torch.Tensor]) -> torch.Tensor:
        """The numbers that ``measure`` makes of ``y`` alone, of values of one shape at once: (n, *tokens) or (n,)."""
        raise NotImplementedError

    def around(self, sites: Sequence[Site]) -> AbstractContextManager[Any]:
        """Return what a probe needs around each reference pass that is recorded, and around training from its first row
        on, where it does nothing unless ``awake``."""
        return nullcontext()

    def begin_row(self) -> None:
        """Called before the numbers of a row: forget what a probe counts from micro-batch to micro-batch."""

    def end_pass(self, kept: bool) -> None:
        """Called when the numbers of a micro-batch were added up (``kept``), or dropped since its forward raised."""

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

    def collect(self, parameters: Parameters) -> Collected:
        """The numbers of all rows at once, as :class:`Collected`; a tuple of its first two fields will do.

        On several ranks they add up: ``parameters.squares`` and ``entries`` are weighted by ``parameters.weights``, so
        that what several ranks hold counts once; other sums must be.
        """
        raise NotImplementedError


class CurvatureProbe(Probe):
    """A probe of the loss of a fixed batch around theta_t, ``on="curvature"``: looked at after the optimizer's step, at
    rows of a cadence of its own. Its table has one row, the model."""

    def lacks(self, parameters: Parameters) -> str:
        """Why this model or optimizer has nothing to measure, as a verb and its object; empty if it has."""
        return "" if parameters.rows else "finds no parameters in this model"

    def look(self, landscape: Landscape, memory: dict[str, Any]) -> Mapping[str, float]:
        """The numbers of a row by column, without those that are not known; ``memory`` is what it remembers from row to
        row, in checkpoints too."""
        raise NotImplementedError


def wide(tensor: torch.Tensor) -> torch.dtype:
    """The type in which magnitudes of ``tensor`` are taken: float32, or its own where that is wider."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def variance(y: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, divided by its size; ``Tensor.var`` takes six times as long on a CPU."""
    y = y.to(wide(y))
    return (y - y.mean(dim=-1, keepdim=True)).square().mean(dim=-1)


PROBES: Registry[type[Probe]] = Registry("probe", Room("stabilitylab.probes.library", "stabilitylab.probes"))
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
    it is "backward" unless said: "step" for one that looks at the parameters alone; of "curvature" it is "update"."""
    if unknown := [
        column for column in (main, *(() if isinstance(unit, str) else unit)) if column not in ("", *columns)
    ]:
        raise ValueError(f"probe {name!r} has no column {unknown[0]!r}; it has {', '.join(columns)}")

    def decorate(cls: type[P]) -> type[P]:
        cls.name, cls.on, cls.total, cls.columns, cls.default = name, on, total, columns, default
        cls.main, cls.log = main or next(iter(columns)), log
        cls.phase = phase or ("backward" if on == "step" else "update" if on == "curvature" else on)
        cls.units = dict.fromkeys(columns, unit) if isinstance(unit, str) else {c: unit.get(c, "") for c in columns}
        cls.unit = "; ".join(dict.fromkeys(filter(None, cls.units.values())))
        cls.at = staticmethod(at or (lambda sites: ()))
        PROBES.register(name)(cls)
        return cls

    return decorate
