"""The first NaN or inf of a run: looked for in every row, reported with the rows around it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ...schema import Cells
from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..incidents.first_place import Locator, Metrics, RowEvidence
from ..incidents.report import Incident, Kept, paragraph
from ..rules import Quantile
from .instrument import Instrument
from .loop_checks import LoopChecks
from .reference_rows import ReferenceRows
from .training_pass import TrainingRows

RING, AFTER = 20, 3  # rows before the incident that are kept, and those after it that the dump waits for
log = logging.getLogger("stabilitylab")


class Forensics(Instrument):
    """Looks at every row that the sink got, keeps the last ones, and makes one :class:`Incident` a run.

    A sink with a method ``incident(facts, rows)`` gets it with the rows around it: at once, and again when 3 more rows
    have come or the run ends.
    """

    def __init__(self, training: TrainingRows, reference: ReferenceRows | None, checks: LoopChecks) -> None:
        self.incident: Incident | None = None
        self._training, self._reference, self._checks = training, reference, checks
        self._ring: deque[Kept] = deque(maxlen=RING + 1 + AFTER)
        self._awaited = 0  # rows after the incident

    def open(self, watched: Watched) -> None:
        self._watched = watched

    def row_begun(self, row: RowRecord, metrics: Metrics) -> None:
        """Look at the parameters if the loss of a row that is not probed is NaN or inf, since one of them may have been
        so before. This needs a row that is read at once: after the optimizer's step hardly a parameter is finite."""
        watched, loss = self._watched, metrics.get("loss")
        if loss is None or math.isfinite(loss) or self.incident is not None or watched.due(row.step):
            return
        if watched.optimizers and watched.ranks.alone and not self._checks.early:  # else it may have stepped already
            with torch.no_grad():
                row.aside["pieces"]["theta"] = watched.parameters.squares(watched.parameters.tensors).cpu().numpy()

    def row_sent(self, row: RowRecord) -> None:
        if self._watched.stages is None:  # a stage of a pipeline knows its own places alone
            self._examine(row)

    def close(self) -> None:
        """Write the incident with the rows that have come, since no row will come any more."""
        if 0 < self._awaited < AFTER:
            self._dump()
        self._awaited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"incident": None if self.incident is None else asdict(self.incident)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (incident := state.get("incident")) is not None:
            self.incident = Incident(**incident)  # a run has one, the first

    def _examine(self, row: RowRecord) -> None:
        """Keep the row; look for a number that is not finite, as long as there was none."""
        metrics, tables = row.read()
        self._ring.append((row.step, metrics, tables))
        if self.incident is None:
            broken, recorded = self._meant(row.broken), self._recorded(tables)
            evidence = RowEvidence(row.step, metrics, tables, broken, row.aside["pieces"], row.aside["clean"], recorded)
            self.incident = self._found(evidence)
            if self.incident is not None:
                log.warning("%s", self.incident.paragraph)
                self._dump()
                self._awaited = AFTER
        elif self._awaited:
            self._awaited -= 1
            if not self._awaited:
                self._dump()

    def _dump(self) -> None:
        take = getattr(self._watched.sink, "incident", None)
        if take is not None and self.incident is not None:
            take(asdict(self.incident), list(self._ring))

    def _recorded(self, tables: Mapping[str, Cells]) -> frozenset[str]:
        """Return the kinds of pass of which the row has a number: a row that is not probed may have the held-out pass
        alone."""
        boards = (board for board in self._watched.boards if board.table.name in tables)
        return frozenset(board.probe.on for board in boards if not tables[board.table.name].absent.all())

    def _meant(self, broken: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the broken cells without the columns where NaN or inf may mean a division by 0, or a number beyond a
        histogram."""
        meant = {}
        for board in self._watched.boards:
            if (cells := broken.get(board.table.name)) is not None:
                told = [c not in board.probe.undefined and not isinstance(r, Quantile) for c, r in board.rules.items()]
                if (cells & told).any():
                    meant[board.table.name] = cells & told
        return meant

    def _found(self, evidence: RowEvidence) -> Incident | None:
        metrics = evidence.fine("loss") and evidence.fine("grad_norm_total")
        if metrics and not evidence.broken and all(np.isfinite(p).all() for p in evidence.pieces.values()):
            return None
        locator = Locator(self._watched.boards, self._watched.parameters, self._order())
        place = locator.first(evidence, self._watched.scaled)
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

    def _order(self) -> dict[tuple[str, int], int]:
        """Return when each place is called in a forward pass; the held-out pass comes after it."""
        held_out, called = self._reference.order if self._reference is not None else {}, self._training.passes.order
        return {**called, **{key: len(called) + n for key, n in held_out.items()}}
