"""The base classes of probes: ``measure`` returns numbers per place, and rules turn them into a table's columns."""

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
    """The numbers of a probe of parameters in one row."""

    columns: Mapping[str, torch.Tensor]  # the additive numbers of each column: (rows, width) float64
    seen: np.ndarray  # which cells exist: (rows, columns) bool
    metrics: Mapping[str, Total] = MappingProxyType({})  # numbers about the whole model
    pieces: Mapping[str, torch.Tensor] = MappingProxyType({})  # "theta", "gradient", "update": squares of each piece


class Probe:
    """A measurement of a few numbers at places of a model. To write one, subclass this class, decorate the subclass
    with :func:`probe`, and write ``measure``.

    ``measure`` gets the input ``x`` of the site's module and the value ``y`` at the site (the module's output or input,
    as ``site.take`` says). With ``on="backward"``, ``y`` is dE/d(that value) and ``x`` is None. The code runs on the
    device: it must not read values on the host, and it must not branch on data. Probes of parameters (``on="step"`` and
    ``on="update"``) subclass :class:`ParameterProbe` instead.
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
    waits: ClassVar[bool] = False  # True if measuring makes the host wait, so that it cannot be part of a CUDA graph
    together: ClassVar[bool] = False  # True if there is a measure_together()
    heads: ClassVar[bool] = False  # True if numbers have a first dimension of heads, each of which has a row
    in_step: ClassVar[bool] = False  # on="step": True if it takes the sums of an optimizer's step (Parameters.in_step)
    in_one_process: ClassVar[bool] = False  # True if it is taken in a single process alone
    in_one_stage: ClassVar[bool] = False  # True if it is refused where a pipeline or share= splits the model
    of_stream: ClassVar[bool] = False  # True if it reads what a layer returns as the residual stream
    by_name: ClassVar[bool] = False  # True if it is taken where its name is given, and not with "all"
    brings: ClassVar[tuple[str, ...]] = ()  # probes that come with it where it is asked for by name
    awake: bool = True  # True if the coming row is probed
    missed: dict[str, str]  # site -> why it has no number
    # numbers of the heads that this rank has at a site, (heads, ...) -> those of all ranks, if it is tensor parallel
    all_heads: Callable[[Site, torch.Tensor], torch.Tensor] = staticmethod(lambda site, numbers: numbers)
    of_batch: BatchPart = BatchPart()  # the part of each batch that this rank works on
    batch_first: bool | None = None  # the caller's word for the layout of what layers return
    # stack -> sizes of what entered its last layer, (..., width), as far as they are known
    entered: Mapping[str, torch.Size] = MappingProxyType({})
    kept: tuple[str, ...] | None = None  # the only columns that this watcher records; None: all that fit

    def __new__(cls, *args: Any, **options: Any) -> Self:
        made = super().__new__(cls)
        made.missed = {}  # whatever an author's __init__ does
        return made

    def keeps(self, column: str) -> bool:
        return self.kept is None or column in self.kept

    def is_sequence_first(self, site: Site, weight: torch.Tensor) -> bool:
        """Return True if a value whose tokens have the shape of ``weight`` is (tokens, samples, ..., width): the caller
        said ``batch_first=False``, and the model has not turned the value, as its sizes would show."""
        if self.batch_first is not False or weight.dim() < 2:
            return False
        sizes, layer = weight.shape[:2], self.entered.get(site.stack, ())
        return not (len(layer) == 3 and sizes[0] != sizes[1] and tuple(sizes) == (layer[1], layer[0]))

    def measure(self, site: Site, x: Any, y: torch.Tensor, weight: torch.Tensor) -> Numbers:
        """Return numbers per token, in the shape of ``weight`` (bool, True on real tokens), or one 0-dim number. Return
        a dict for several numbers, and None if this call has nothing to measure."""
        raise NotImplementedError

    def unmeasured(self, device: torch.device) -> Numbers:
        """Return numbers that mark a call whose value cannot be read. None: the cell stays empty, as if the place had
        never been reached."""
        return None

    def over_heads(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a module from those of its heads, (heads, ...): the largest."""
        return numbers.amax(0)

    def measure_together(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Return the numbers that ``measure`` makes from ``y`` alone, for several values of one shape at once: (n,
        *tokens) or (n,)."""
        raise NotImplementedError

    def around(self, sites: Sequence[Site]) -> AbstractContextManager[Any]:
        """Return a context manager that the probe needs while it measures. It is entered around each reference pass
        that is recorded. For probes of the training pass it is entered at the first row and stays open; there it must
        do nothing unless ``awake``."""
        return nullcontext()

    def begin_row(self) -> None:
        """Forget the counts from micro-batch to micro-batch; called before the numbers of a row."""

    def end_pass(self, kept: bool) -> None:
        """Note the end of a micro-batch. ``kept``: True if its numbers were added up, False if they were dropped
        because its forward raised an error."""

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
    """A probe of parameters. With ``on="step"`` it reads parameters and gradients before the optimizer's step; with
    ``on="update"`` it reads the parameters before and after that step."""

    def lacks(self, parameters: Parameters) -> str:
        """Return the reason if this model or optimizer has nothing to measure, as a verb and its object; "" if it has
        something."""
        return "" if parameters.rows else "finds no parameters in this model"

    def rows(self, parameters: Parameters) -> Sequence[Row]:
        """Return the rows of the table: one for each group of parameters, unless the probe has rows of its own."""
        return parameters.rows

    def fitting(self, parameters: Parameters) -> Sequence[str]:
        """Return the columns that the parameters of this model can fill."""
        return tuple(self.columns)

    def before(self, parameters: Parameters) -> None:
        """Keep whatever the measurement after the update needs; called in ``Watcher.step`` for ``on="update"``."""

    def after_step(self, parameters: Parameters, number: int) -> None:
        """Take what may be gone once other optimizers have stepped, such as gradients. If there are several optimizers,
        this is called for ``on="update"`` after each step of the optimizer of this number."""

    def collect(self, parameters: Parameters) -> Collected:
        """Return the numbers of all rows at once, as :class:`Collected` or as a tuple of its first two fields.

        On several ranks the numbers add up, so an entry that several ranks hold must count once. ``parameters.squares``
        and ``parameters.entries`` are already weighted for that, by ``parameters.weights``. You must weight any other
        sum yourself.
        """
        raise NotImplementedError


class CurvatureProbe(Probe):
    """A probe of the loss of a fixed batch around theta_t, with ``on="curvature"``. It runs after the optimizer's step,
    at rows of its own cadence. Its table has one row, the model."""

    def lacks(self, parameters: Parameters) -> str:
        """Return the reason if this model or optimizer has nothing to measure, as a verb and its object; "" if it has
        something."""
        return "" if parameters.rows else "finds no parameters in this model"

    def look(self, landscape: Landscape, memory: dict[str, Any]) -> Mapping[str, float]:
        """Return the numbers of a row by column, without those that are not known. ``memory`` keeps values from row to
        row, and checkpoints store it."""
        raise NotImplementedError


def wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which magnitudes of ``tensor`` are computed: float32, or its own type if that is wider."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def variance(y: torch.Tensor) -> torch.Tensor:
    """Return the variance over the last dimension, divided by its size. (``Tensor.var`` takes six times as long on a
    CPU.)"""
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
    """Register a probe class under ``name``.

    - ``on``: when it measures. ``at``: where it measures (not for probes of parameters).
    - ``columns``: the columns of its table, each with the rule that makes it. ``unit``: the unit of all columns, or of
      each by name.
    - ``total``, ``main``, ``log``: as in :class:`Table`.
    - ``default``: True if the probe runs unless it is left out.
    - ``phase``: the data that the numbers depend on. By default it follows from ``on``. A probe with ``on="step"`` sees
      parameters and gradients, so its phase is "backward"; give "step" if it reads only the parameters. For
      ``on="curvature"`` it is "update".

    Raises ValueError if ``main`` or ``unit`` names a column that does not exist.
    """
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
