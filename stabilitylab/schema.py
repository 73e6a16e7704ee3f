"""The data that a probe passes to a sink: tables, their rows (places in a model) and their columns (numbers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

__all__ = ["Cells", "Row", "Sink", "Table"]

# The data of a row's numbers: the parameters theta_t, and the held-out batch under theta_t; the training batch too; its
# gradients; the update made of those, theta_t -> theta_{t+1}.
Phase = Literal["step", "reference", "forward", "backward", "update"]

EVERY_ROW = "every=1, on the command line --every 1"  # the advice if numbers need every row probed


@dataclass(frozen=True)
class Row:
    """One place in a model. ``layer`` counts from 1; 0 means outside the layers (an embedding, a final norm)."""

    site: str
    stack: str = ""
    layer: int = 0
    sublayer: str = ""


@dataclass(frozen=True)
class Table:
    """One probe's table: a fixed set of rows times a fixed set of float64 columns, filled at each probed step.

    ``total`` says how rows of one layer combine: ``"norm"`` (root of the sum of squares), ``"mean"``, or ``""`` if a
    combination has no meaning. ``phase``: the data that its numbers depend on. ``main``: the column that is drawn and
    read if only one can be, by default the first; ``unit`` is that of this column. ``log``: True if the main column is
    drawn on a logarithmic axis, None if its numbers decide. ``undefined``: columns in which NaN or inf may just mean a
    zero denominator. Raises ValueError for a phase or a column that does not exist.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: str = ""
    definition: str = ""
    total: str = ""
    phase: Phase = "forward"
    main: str = ""
    log: bool | None = None
    undefined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.phase not in get_args(Phase):
            raise ValueError(
                f"unknown phase {self.phase!r} of {self.name!r}; choose one of {', '.join(get_args(Phase))}"
            )
        if unknown := [column for column in (self.main, *self.undefined) if column not in ("", *self.columns)]:
            raise ValueError(f"{self.name!r} has no column {unknown[0]!r}; it has {', '.join(self.columns)}")
        if not self.main and self.columns:
            object.__setattr__(self, "main", self.columns[0])

    @property
    def sound(self) -> str:
        """Return the main column, or the first one in its place in which every NaN is a finding; "" for none."""
        told = [column for column in (self.main, *self.columns) if column not in self.undefined]
        return told[0] if told else ""


@dataclass(frozen=True)
class Cells:
    """One table at one step: ``values`` (rows, columns) float64; ``absent`` (rows,) True where no gradient existed.

    ``missing`` (rows, columns): True where there is no such cell (a group of parameters that a row lacks), which is not
    the same as a measured NaN; None: no cell is missing.
    """

    values: np.ndarray
    absent: np.ndarray
    missing: np.ndarray | None = None


class Sink(Protocol):
    """The receiver of rows: a run directory, a tracker, a list in a test. One ``append`` a step, everything in it."""

    def open(self, tables: Sequence[Table]) -> None: ...

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def close(self) -> None: ...
