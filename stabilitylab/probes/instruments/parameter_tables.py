"""The tables of parameters, and the norm of the whole gradient of every row."""

from __future__ import annotations

from collections.abc import Sequence

from .._engine.board import Board
from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..base import Collected, ParameterProbe, When
from .instrument import Instrument, Moment


class ParameterTables(Instrument):
    """Fills the tables of probes of parameters: while gradients are there, and once all optimizers have stepped."""

    def open(self, watched: Watched) -> None:
        self._watched = watched

    @property
    def boards(self) -> Sequence[Board]:
        return self._watched.on("step", "update")

    def after_backward(self, row: RowRecord) -> None:
        later = False
        parameters = self._watched.parameters
        if self._watched.due(row.step):
            if (own := parameters.measuring) is not None:
                own.measure(parameters.cuts)
            self._collect(row, "step")
            for board in self._boards("update"):
                row.owe()
                later |= board.probe.on == "step"
                self._before(board)
        if self._watched.total and not later and "grad_norm_total" not in row:
            row.metric("grad_norm_total", parameters.total_norm())

    def after_update(self, row: RowRecord) -> None:
        if self._watched.due(row.step):
            self._collect(row, "update")

    def share(self, moment: Moment, row: RowRecord) -> Sequence[Board]:
        if not self._watched.due(row.step) or moment not in ("after_backward", "after_update"):
            return ()
        return self._boards("step" if moment == "after_backward" else "update")

    def _boards(self, when: When) -> list[Board]:
        """Return the boards of "step" or "update". The sums of an optimizer's own step come with the update."""
        later = self._watched.parameters.measuring is not None
        return [each for each in self.boards if ("update" if later and each.probe.in_step else each.probe.on) == when]

    def _collect(self, row: RowRecord, when: When) -> None:
        """Add the tables of the probes of parameters."""
        watched = self._watched
        for board in self._boards(when):
            if not board.ended and board.table.rows:
                assert isinstance(board.probe, ParameterProbe)
                try:
                    found = Collected(*board.probe.collect(watched.parameters))
                    board.collect(found)
                except Exception as error:
                    watched.guard(board, error)
                else:
                    for name, value in found.metrics.items():
                        row.metric(name, value)
                    for name, squares in found.pieces.items() if watched.ranks.alone else ():
                        row.set_aside("pieces", name, squares)
            row.table(board)

    def _before(self, board: Board) -> None:
        """Let a probe of updates keep what it compares with after the optimizer's step."""
        if board.table.rows:
            assert isinstance(board.probe, ParameterProbe)
            try:
                board.probe.before(self._watched.parameters)
            except Exception as error:
                self._watched.guard(board, error)
