"""What a probe hands to a sink: tables, their rows (places in a model) and their columns (numbers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


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

    ``total`` says how rows of one layer combine: ``"norm"`` (root of the sum of squares), ``"mean"``, or ``""``
    where combining them means nothing.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    unit: str = ""
    definition: str = ""
    total: str = ""


@dataclass(frozen=True)
class Cells:
    """One table at one step: ``values`` (rows, columns) float64; ``absent`` (rows,) True where no gradient existed."""

    values: np.ndarray
    absent: np.ndarray


class Sink(Protocol):
    """Where rows go: a run directory, a tracker, a list in a test. One ``append`` a step, everything in it."""

    def open(self, tables: Sequence[Table]) -> None: ...

    def append(self, step: int, metrics: Mapping[str, float | None], tables: Mapping[str, Cells]) -> None: ...

    def close(self) -> None: ...
