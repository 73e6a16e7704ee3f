"""The first NaN or inf of a run: what is said about it, and the rows around it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...schema import EVERY_ROW, Cells
from .._engine.board import Board
from .._engine.row import Aside
from ..parameters.pieces import Parameters
from ..rules import Quantile
from .first_place import Locator, Metrics, Order, Phase, RowEvidence, Suspect

RING, AFTER = 20, 3  # rows before the incident that are kept, and those after it that the dump waits for
Kept = tuple[int, Metrics, Mapping[str, Cells]]
log = logging.getLogger("stabilitylab")


@dataclass(frozen=True)
class Incident:
    """The first place, in order of execution, where a recorded number is NaN or inf.

    ``step``: the row. ``micro_batch`` counts from 0; None where it is not known (several ranks, a row not probed).
    ``kind``: "parameter" (its value), "activation", "gradient" (of a parameter or an activation), "loss", "update".
    ``name``: of the parameter or the site; "" where the row was not probed. ``value``: "nan" or "inf". ``before``: the
    last place before it whose number was finite. ``paragraph``: all that in a few sentences.
    """

    step: int
    micro_batch: int | None
    phase: Phase
    kind: str
    name: str
    stack: str
    layer: int
    sublayer: str
    table: str
    value: str
    before: str
    paragraph: str


class Forensics:
    """Looks at every row that the sink got, keeps the last ones, and makes one :class:`Incident` a run.

    A sink with a method ``incident(facts, rows)`` gets it with the rows around it: at once, and again when 3 more rows
    have come or the run ends.
    """

    def __init__(
        self, boards: Sequence[Board], parameters: Parameters, order: Callable[[], Order], sink: Any, scaled: bool
    ) -> None:
        self.incident: Incident | None = None
        self._boards, self._parameters, self._order, self._sink = boards, parameters, order, sink
        self._scaled = scaled
        self._ring: deque[Kept] = deque(maxlen=RING + 1 + AFTER)
        self._awaited = 0  # rows after the incident

    def examine(
        self,
        step: int,
        metrics: Metrics,
        tables: Mapping[str, Cells],
        broken: Mapping[str, np.ndarray],
        aside: Mapping[Aside, Mapping[str, np.ndarray]],
    ) -> None:
        """Takes a row, its recorded cells that are not finite, and what its record set aside."""
        self._ring.append((step, metrics, tables))
        if self.incident is None:
            meant, recorded = self._meant(broken), self._recorded(tables)
            evidence = RowEvidence(step, metrics, tables, meant, aside["pieces"], aside["clean"], recorded)
            self.incident = self._found(evidence)
            if self.incident is not None:
                log.warning("%s", self.incident.paragraph)
                self._dump()
                self._awaited = AFTER
        elif self._awaited:
            self._awaited -= 1
            if not self._awaited:
                self._dump()

    def finish(self) -> None:
        """No row will come any more."""
        if 0 < self._awaited < AFTER:
            self._dump()
        self._awaited = 0

    def _dump(self) -> None:
        take = getattr(self._sink, "incident", None)
        if take is not None and self.incident is not None:
            take(asdict(self.incident), list(self._ring))

    def _recorded(self, tables: Mapping[str, Cells]) -> frozenset[str]:
        """The kinds of pass of which the row has a number: one that was not probed may have the held-out pass alone."""
        boards = (board for board in self._boards if board.table.name in tables)
        return frozenset(board.probe.on for board in boards if not tables[board.table.name].absent.all())

    def _meant(self, broken: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Without the columns where NaN or inf may mean a division by 0, or a number beyond a histogram."""
        meant = {}
        for board in self._boards:
            if (cells := broken.get(board.table.name)) is not None:
                told = [c not in board.probe.undefined and not isinstance(r, Quantile) for c, r in board.rules.items()]
                if (cells & told).any():
                    meant[board.table.name] = cells & told
        return meant

    def _found(self, evidence: RowEvidence) -> Incident | None:
        metrics = evidence.fine("loss") and evidence.fine("grad_norm_total")
        if metrics and not evidence.broken and all(np.isfinite(p).all() for p in evidence.pieces.values()):
            return None
        locator = Locator(self._boards, self._parameters, self._order())
        place = locator.first(evidence, self._scaled)
        if place is None:
            return None
        before = locator.last_finite(evidence, place) if place.kind == "activation" else ""
        micro_batch = place.micro_batch
        if place.table and place.phase != "reference" and evidence.pieces and not evidence.clean:
            micro_batch = 0  # there was one
        row = place.row
        return Incident(
            step=evidence.step,
            micro_batch=micro_batch,
            phase=place.phase,
            kind=place.kind,
            name=place.name,
            stack=row.stack,
            layer=row.layer,
            sublayer=row.sublayer,
            table=place.table,
            value="nan" if math.isnan(place.number) else "inf",
            before=before,
            paragraph=paragraph(place, evidence, before, list(self._ring)[-2:-1]),
        )


def paragraph(place: Suspect, evidence: RowEvidence, before: str, earlier: Sequence[Kept]) -> str:
    """What happened, where, and what the row before was like."""
    number = "NaN" if math.isnan(place.number) else "infinite"
    batch = "" if place.micro_batch is None else f", micro-batch {place.micro_batch}"
    where = f" (stack {place.row.stack}, layer {place.row.layer})" if place.row.layer else ""
    what = {
        "parameter": f"before the forward pass parameter {place.name}{where} holds a value that is {number}",
        "activation": f"in the forward pass the first number that is not finite is {place.table} at "
        f"{place.name}{where}: {number}",
        "loss": f"the loss is {number}"
        + ", though every recorded place of the forward pass is finite" * ("forward" in evidence.recorded),
        "gradient": f"the loss is finite, and in the backward pass the gradient of {place.name}{where} is {number}",
        "update": f"gradients are finite, and the optimizer's update of {place.name}{where} is {number}",
    }[place.kind]
    if place.kind == "gradient" and not place.name:
        what = f"the loss is finite, and the norm of all gradients is {number}"
    if place.phase == "reference":
        what = f"training is finite, and in the held-out pass {place.table} at {place.name}{where} is {number}"
    sentences = [f"Step {evidence.step}{batch}: {what}."]
    if before:
        sentences.append(f"The place before it was finite: {before}.")
    if place.kind == "activation" and place.phase == "forward":
        sentences.append(
            "All parameters were finite, so it arose in the computation between the two."
            if "theta" in evidence.pieces
            else "Whether a parameter was so already is recorded with optimizer= alone (probe update_ratio)."
        )
    if place.kind == "loss" and "theta" in evidence.pieces:
        sentences.append("All parameters were finite.")
    if not place.name and evidence.recorded <= {"reference", "curvature"}:
        sentences.append(f"This row was not probed, so that no place is known: record from here with {EVERY_ROW}.")
    for step, metrics, _ in earlier:
        known = {name: metrics.get(name) for name in ("loss", "grad_norm_total", "lr")}
        numbers = [f"{name} {value:.4g}" for name, value in known.items() if value is not None]
        sentences.append(f"Step {step} had {', '.join(numbers)}." if numbers else "")
    return " ".join(filter(None, sentences))
