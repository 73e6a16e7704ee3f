"""The way of a row to the sink: it waits for the optimizers' steps, is copied to the host, read, sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from ...schema import Cells
from .._engine.board import Board
from .._engine.row import Metrics, RowRecord, State, Template
from .._engine.watched import Watched
from ..incidents.report import Incident
from ..instruments.instrument import Instruments
from ..instruments.loop_checks import LoopChecks
from .assembly import Assembly


class Delivery:
    """Holds the row that waits: for the optimizers' steps, or for its copy to arrive."""

    def __init__(self, watched: Watched, instruments: Instruments, checks: LoopChecks, parts: Assembly) -> None:
        self.row: RowRecord | None = None
        self.last: tuple[int, dict[str, float | None], dict[str, Cells]] | None = None  # what the sink got last
        self._watched, self._instruments, self._checks, self._parts = watched, instruments, checks, parts
        self._steps: set[int] = set()  # optimizers whose step the row still waits for

    def hold(self, row: RowRecord) -> None:
        """This row comes next; one that is owed numbers waits for the steps of all optimizers."""
        self.row = row
        self._steps = set(range(len(self._watched.optimizers))) if row.state is State.OWED else set()

    def stepped(self, number: int) -> None:
        """An optimizer has stepped."""
        self._steps.discard(number)
        if not self._steps:
            self.complete()

    def complete(self) -> None:
        """Adds to the row what the update did. One that never came left the parameters as they were: numbers of 0."""
        if self.row is not None and self.row.state is State.OWED:
            with torch.no_grad():
                self._instruments.call("after_update", self.row)
                if self.row.is_live:
                    self._instruments.call("host_after_update", self.row)
            self.row.ship()

    def settle(self, alone: bool = False) -> None:
        """The row as far as it is known: a scaler skipped the update, or the interruption came before it; ``alone``:
        without the other ranks, which may be elsewhere, so that one that they are needed for is given up."""
        if alone and self.row is not None and self.row.waits:
            self.row = None
            self._instruments.call("abort")
        if self._watched.scaler is not None:
            self.complete()
        elif self.row is not None and self.row.state is State.OWED:
            self._instruments.call("skipped", self.row)
            self.row.ship()
            self.row.state = State.SHIPPED

    def send(self) -> None:
        """The row to the sink, which waits for the device."""
        self.complete()
        if self.row is not None:
            row, self.row = self.row, None
            row.ship()
            metrics, tables = row.read()
            for board in self._watched.boards:
                if board.table.name in row.ended:
                    self._ended(board)
            self._watched.guard.trying = False
            self._instruments.call("row_read", row)
            self.last = (row.step, metrics, tables)
            self._watched.sink.append(*self.last)
            if self._watched.stages is None:  # which have the places of their own
                self._parts.forensics.examine(*self.last, row.broken, row.aside)

    def _ended(self, board: Board) -> None:
        """A table ended on another rank, or on all, which found that they do not agree."""
        ranks, guard = self._watched.ranks, self._watched.guard
        if ranks is not None and not board.ended and (why := ranks.apart.get(board.table.name)):
            guard.disagree([board], why, ranks.rank == 0)
        else:
            guard.elsewhere(board)

    def begin(self) -> None:
        """What is known of the row to a sink that takes it (``begin``): where reading it waits for nothing, and on a
        GPU too once a number was not finite, since then each row may be the last."""
        begin = getattr(self._watched.sink, "begin", None)
        if self.row is None or begin is None or self.row.waits:
            return
        if self._reads_at_once():
            metrics, tables = self.row.read()
            self._look_closer(self.row, metrics)
            begin(self.row.step, metrics, tables)

    def _reads_at_once(self) -> bool:
        return self._watched.parameters.device.type == "cpu" or self._parts.forensics.incident is not None

    def _look_closer(self, row: RowRecord, metrics: Metrics) -> None:
        """At a row that is not probed whose loss is NaN or inf: whether a parameter was so before. That can be asked
        where the row is read at once, since the optimizer's step leaves hardly a parameter finite."""
        watched, loss = self._watched, metrics.get("loss")
        if loss is None or math.isfinite(loss) or self._parts.forensics.incident is not None or watched.due(row.step):
            return
        if watched.optimizers and watched.ranks is None and not self._checks.early:  # else it may have stepped already
            with torch.no_grad():
                row.aside["pieces"]["theta"] = watched.parameters.squares(watched.parameters.tensors).cpu().numpy()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Around device work that is recorded instead of done: it ends no row and leaves no number behind."""
        pending, self.row = self.row, None
        self._watched.guard.recording = True
        try:
            yield
        finally:
            self._watched.guard.recording = False
            self.row = pending
            for board in self._watched.boards:
                board.clear()

    def replay(self, t: int, template: Template, run: Callable[[], None]) -> RowRecord:
        """Row t by ``run``, which replays what was recorded with ``template``; it is held, the one before is sent."""
        row = RowRecord(t, self._watched.parameters.device)
        with torch.no_grad():
            self._instruments.call("host", row)
            run()
            row.adopt(template)
            self._instruments.call("host_after_update", row)
            row.ship()
        self.send()
        self.hold(row)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The row that waits, what the coming ones are compared with, and where the run first broke."""
        incident = self._parts.forensics.incident
        return {
            "pending": self.row and self.row.state_dict(),
            "reference": None,
            **self._instruments.state_dict(),
            "incident": None if incident is None else asdict(incident),
            "tapped": self._parts.tapped.places,
            "not_neutral": [*self._watched.audit.not_neutral],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (known := state.get("tapped")) is not None:
            self._parts.recall_places(known)
        self.row = RowRecord.from_state(state["pending"]) if state["pending"] else None
        if (incident := state.get("incident")) is not None:
            self._parts.forensics.incident = Incident(**incident)  # a run has one, the first
        self._watched.audit.not_neutral += state.get("not_neutral", ())
        self._instruments.load_state_dict(state)
