"""The tables of parameters, and the norm of the whole gradient of every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._engine.board import Board
from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..base import Collected, ParameterProbe, When
from .instrument import Instrument, Moment
from .loop_checks import LoopChecks


class ParameterTables(Instrument):
    """Fills the tables of probes of parameters: while gradients are there, and once all optimizers have stepped.

    Each row describes the parameters that the model has then. If the model has got parameters without a row in the
    tables, or lost some, the tables and the norm of the whole gradient end.
    """

    def __init__(self, checks: LoopChecks) -> None:
        self._checks = checks
        self._ended = False
        self._owing = False  # numbers about the update are still to come

    def open(self, watched: Watched) -> None:
        self._watched = watched

    @property
    def boards(self) -> Sequence[Board]:
        return self._watched.on("step", "update")

    def after_backward(self, row: RowRecord) -> None:
        self._follow(row.step)
        later = self._owing = False
        parameters = self._watched.parameters
        if self._watched.due(row.step):
            if (own := parameters.measuring) is not None:
                own.measure(parameters.cuts)
            self._collect(row, "step")
            for board in self._boards("update"):
                row.owe()
                self._owing = True
                later |= board.probe.on == "step"
                self._before(board)
        if self._watched.total and not later and "grad_norm_total" not in row:
            row.metric("grad_norm_total", None if self._ended else parameters.total_norm())

    def after_step(self, number: int) -> None:
        for board in self._boards("update") if self._owing and len(self._watched.optimizers) > 1 else ():
            if not board.ended and board.table.rows:
                assert isinstance(board.probe, ParameterProbe)
                try:
                    with torch.no_grad():
                        board.probe.after_step(self._watched.parameters, number)
                except Exception as error:
                    self._watched.guard(board, error)

    def after_update(self, row: RowRecord) -> None:
        self._owing = False
        if self._watched.due(row.step):
            self._collect(row, "update")

    def share(self, moment: Moment, row: RowRecord) -> Sequence[Board]:
        if not self._watched.due(row.step) or moment not in ("after_backward", "after_update"):
            return ()
        return self._boards("step" if moment == "after_backward" else "update")

    def _follow(self, row: int) -> None:
        """Read the parameters that the model has now; end what would miss some of them."""
        watched = self._watched
        if self._ended or not (names := watched.parameters.follow()):
            return
        self._ended = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self._checks.warn(
            row,
            "parameters",
            f"the model has got or lost parameters since watch began ({names[0]}{more}): grad_norm_total and the "
            "tables of parameters would miss them and end here; give watch the model with all its parameters",
        )
        watched.guard.stop(watched.on("step", "update", "curvature"), "the model has got or lost parameters")

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
