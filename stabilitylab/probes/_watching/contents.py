"""What goes into a row: what the passes left, what gradients tell, what the optimizer's step changed."""

from __future__ import annotations

import math

import torch

from .._engine.board import Board
from .._engine.cadence import Cadence, is_due
from .._engine.notices import unlike
from .._engine.row import Metrics, RowRecord, State, Template
from ..base import Collected, ParameterProbe, When
from .assembly import Assembly


class Contents:
    """Fills rows from the parts of a watcher; ``every``: those whose training pass is probed; ``total``: each row has
    the norm of the whole gradient, probed or not."""

    def __init__(self, parts: Assembly, every: Cadence, total: bool) -> None:
        self.early = False  # an optimizer's step before the first row
        self._compared = False
        self.total = total
        # whether the training pass is probed
        self.trains = parts.tapped.expected or any(
            board.probe.on not in ("reference", "curvature") for board in parts.boards
        )
        self._parts = parts
        self._every: Cadence = every

    def due(self, t: int) -> bool:
        """Whether the training pass of this row is probed."""
        return self.trains and is_due(t, self._every)

    def fill(self, row: RowRecord, t: int) -> None:
        """Adds what is known at ``step``."""
        parts = self._parts
        later = False
        self._compare(t)
        if self.due(t):
            if (own := parts.parameters.measuring) is not None:
                own.measure(parts.parameters.cuts)
            self._passes(row, t)
            for board in self._boards("update"):
                row.state = State.OWED
                later |= board.probe.on == "step"
                self._before(board)
        elif is_due(t, self._every):
            self._look_at_loop(t)
        parts.leftover.end_row(row, self.due(t))
        if not isinstance(row, Template) and parts.curvature.due(t):
            row.state = State.OWED
            parts.curvature.start()
        if self.total and not later and "grad_norm_total" not in row:
            row.metric("grad_norm_total", parts.parameters.total_norm())

    def complete(self, row: RowRecord) -> None:
        """Adds what is known once the optimizers have stepped."""
        if self.due(row.step):
            self.collect(row, "update")
        if not isinstance(row, Template) and self._parts.curvature.due(row.step):
            self._parts.curvature.fill(row)

    def look_closer(self, row: RowRecord, metrics: Metrics) -> None:
        """At a row that is not probed whose loss is NaN or inf: whether a parameter was so before. That can be asked
        where the row is read at once, since the optimizer's step leaves hardly a parameter finite."""
        parts, loss = self._parts, metrics.get("loss")
        if loss is None or math.isfinite(loss) or parts.forensics.incident is not None or self.due(row.step):
            return
        if parts.optimizers and parts.ranks is None and not self.early:  # else it may have stepped already
            with torch.no_grad():
                row.aside["pieces"]["theta"] = parts.parameters.squares(parts.parameters.tensors).cpu().numpy()

    def _compare(self, t: int) -> None:
        """Once: ends what is added up over ranks that do not have the same gradient, as they should."""
        parts, ranks = self._parts, self._parts.ranks
        if self._compared or ranks is None:
            return
        self._compared = True
        if names := parts.parameters.unlike():
            self.total = False
            boards = parts.on("step", "update", "backward", "curvature")
            parts.guard.disagree(boards, unlike(t, names), ranks.rank == 0)

    def _boards(self, when: When) -> list[Board]:
        """Those of parameters, "step" or "update"; what an optimizer sums in its own step comes with the update."""
        later = self._parts.parameters.measuring is not None
        boards = self._parts.on("step", "update")
        return [each for each in boards if ("update" if later and each.probe.in_step else each.probe.on) == when]

    def collect(self, row: RowRecord, when: When) -> None:
        """Adds the tables of the probes of parameters."""
        parts = self._parts
        for board in self._boards(when):
            if not board.ended and board.table.rows:
                assert isinstance(board.probe, ParameterProbe)
                try:
                    found = Collected(*board.probe.collect(parts.parameters))
                    board.collect(found)
                except Exception as error:
                    parts.guard(board, error)
                else:
                    for name, value in found.metrics.items():
                        row.metric(name, value)
                    for name, squares in found.pieces.items() if parts.ranks is None else ():
                        row.set_aside("pieces", name, squares)
            row.table(board)

    def _passes(self, row: RowRecord, t: int) -> None:
        """Adds the tables of activations and of gradients; says which places no call came by."""
        parts, training = self._parts, self._parts.training
        boards = parts.on("forward", "backward")
        training.end()
        self._look_at_loop(t)
        if training.order:  # else there was no forward pass to be seen, which is said above
            parts.notices.look(t, "training", boards, training.order)
        self.collect(row, "step")
        parts.notices.apart(t, parts.parameters)
        for board in boards:
            row.table(board)
        for name, clean in (parts.clean.take(boards) if parts.clean else {}).items():
            row.set_aside("clean", name, clean)

    def _look_at_loop(self, t: int) -> None:
        parts = self._parts
        parts.notices.loop(t, parts.training, parts.parameters, parts.boards, self.total, self.early)

    def _before(self, board: Board) -> None:
        """Lets a probe of updates keep what it compares with after the optimizer's step."""
        if board.table.rows:
            assert isinstance(board.probe, ParameterProbe)
            try:
                board.probe.before(self._parts.parameters)
            except Exception as error:
                self._parts.guard(board, error)
