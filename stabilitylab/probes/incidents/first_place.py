"""The place in a row of the first number that is not finite, in order of execution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...schema import Cells, Row
from .._engine.board import Board
from ..parameters.pieces import Parameters

Phase = Literal["forward", "loss", "backward", "update", "reference"]
Metrics = Mapping[str, float | None]
NOWHERE = Row("")
Order = Mapping[tuple[str, int], int]  # (table, row) -> when the place is called in a forward pass


@dataclass(frozen=True)
class RowEvidence:
    """One row as it was read. ``broken``: by table, the recorded cells that are not finite. ``pieces``: sums of squares
    of each piece of a parameter ("theta", "gradient", "update"). ``clean``: by table, the number of micro-batches that
    left each place finite. ``recorded``: the kinds of pass of which there is a number."""

    step: int
    metrics: Metrics
    tables: Mapping[str, Cells]
    broken: Mapping[str, np.ndarray]
    pieces: Mapping[str, np.ndarray]
    clean: Mapping[str, np.ndarray]
    recorded: frozenset[str] = frozenset()

    def fine(self, metric: str) -> bool:
        value = self.metrics.get(metric)
        return value is None or math.isfinite(value)


@dataclass(frozen=True)
class Suspect:
    """A number that is not finite. ``position``: when its place is called in a forward pass; in a backward pass the
    larger position comes first.

    ``kind``: "parameter" (its value), "activation", "gradient" (of a parameter or an activation), "loss", "update".
    """

    phase: Phase
    kind: str
    position: float
    number: float
    name: str = ""
    row: Row = NOWHERE
    table: str = ""
    micro_batch: int | None = None


class Locator:
    """Puts places in order: forward (a parameter's value, then activations), loss, backward, optimizer, held-out."""

    def __init__(self, boards: Sequence[Board], parameters: Parameters, order: Order) -> None:
        self._boards = {board.table.name: board for board in boards}
        self._parameters, self._order = parameters, order

    def first(self, evidence: RowEvidence, scaled: bool) -> Suspect | None:
        """Return the first number that is not finite; None if there is none. ``scaled``: a GradScaler scales the loss
        and skips updates whose gradients overflow, so that a gradient that is not finite is no finding: the result is
        None."""
        values = self._pieces(evidence, "theta", "parameter", "forward")
        entering = self._activations(evidence, "activation", "forward")
        for places in (values, entering):
            if found := min(places, key=lambda place: place.position, default=None):
                return found
        if not evidence.fine("loss"):
            return Suspect("loss", "loss", math.inf, evidence.metrics["loss"] or math.nan)
        if found := max(self._backward(evidence), key=lambda place: place.position, default=None):
            return None if scaled else found
        if found := min(self._updates(evidence), key=lambda place: place.position, default=None):
            return found
        held_out = self._activations(evidence, "activation", "reference")
        return min(held_out, key=lambda place: place.position, default=None)

    def last_finite(self, evidence: RowEvidence, place: Suspect) -> str:
        """Return the place that was called last before this one and recorded a finite number; "" for none."""
        earlier = [(p, key) for key, p in self._order.items() if p < place.position and key[0] in evidence.tables]
        for _, (table, number) in sorted(earlier, reverse=True):
            row, value = self._boards[table].table.rows[number], evidence.tables[table].values[number][0]
            if row.site != place.name and math.isfinite(value):
                return f"{row.site} ({table} {value:.3g})"
        return ""

    def _activations(self, evidence: RowEvidence, kind: str, phase: Phase) -> Iterator[Suspect]:
        for name in evidence.broken:
            if self._boards[name].probe.on == phase:
                yield from self._table(evidence, name, kind, phase)

    def _table(self, evidence: RowEvidence, name: str, kind: str, phase: Phase) -> Iterator[Suspect]:
        broken, clean = evidence.broken.get(name), evidence.clean.get(name)
        if broken is None:
            return
        for number in np.flatnonzero(broken.any(axis=1)):
            row = self._boards[name].table.rows[number]
            position = self._order.get((name, int(number)), self._position(row))
            value = float(evidence.tables[name].values[number][broken[number]][0])
            micro_batch = None if clean is None else int(clean[number])
            yield Suspect(phase, kind, position, value, row.site, row, name, micro_batch)

    def _backward(self, evidence: RowEvidence) -> Iterator[Suspect]:
        yield from self._activations(evidence, "gradient", "backward")
        yield from self._pieces(evidence, "gradient", "gradient", "backward")
        if "gradient" not in evidence.pieces:  # on several ranks the sub-layer alone is known
            yield from self._table(evidence, "grad_norm", "gradient", "backward")
        if not evidence.fine("grad_norm_total"):  # a row that was not probed has no place: last of all suspects
            yield Suspect("backward", "gradient", -math.inf, evidence.metrics["grad_norm_total"] or math.nan)

    def _updates(self, evidence: RowEvidence) -> Iterator[Suspect]:
        yield from self._pieces(evidence, "update", "update", "update")
        if "update" not in evidence.pieces:
            yield from self._table(evidence, "update_ratio", "update", "update")

    def _pieces(self, evidence: RowEvidence, what: str, kind: str, phase: Phase) -> Iterator[Suspect]:
        squares = evidence.pieces.get(what, np.empty(0))
        for number in np.flatnonzero(~np.isfinite(squares)):
            piece = self._parameters.pieces[number]
            # in a backward pass a layer's parameters come after the gradient of its output, before that of its input
            position = self._position(piece.row) - 0.5
            name = self._parameters.names[piece.index]
            yield Suspect(phase, kind, position, float(squares[number]), name, piece.row)

    def _position(self, row: Row) -> float:
        """Return when a row's sub-layer ends in a forward pass, or else its layer. A row outside the layers has the
        position of its site. Without such a site the row comes after all layers if its parameters are registered behind
        them, else before."""
        same_layer, own = [-1.0], [-1.0]
        for (table, number), position in self._order.items():
            other = self._boards[table].table.rows[number]
            if other.site == row.site or (row.layer and other == row):
                own.append(position)
            elif row.layer and (other.stack, other.layer) == (row.stack, row.layer):
                same_layer.append(position)
        if max(own) < 0 and not row.layer and self._parameters.is_behind(row):
            return len(self._order) + 1.0
        return max(own) if max(own) >= 0 else max(same_layer)
