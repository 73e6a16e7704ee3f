"""The rows of curvature: when the loss around theta_t is looked at, on which batch, and what a resumed run needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import StabilityLabError, UsageError, listed
from ..base import Collected, CurvatureProbe
from ..curvature.landscape import Landscape
from ..parameters.pieces import Parameters
from ..parameters.ranks import Ranks
from .board import Board
from .cadence import CurvatureCadence, is_curved
from .evaluation import evaluation, random_states_kept
from .first_batch import FirstBatch
from .guard import Guard
from .neutral_pass import Audit, NeutralPass
from .options import CurvatureBatch
from .row import RowRecord
from .selection import LOSS
from .update_batch import UpdateBatch
from .watchable import with_hooks

UNSEEN = (
    "curvature_batch='update' saw no training forward of the whole model: call the model itself, or give "
    "curvature_loss=, a function that returns the loss of the batch that was trained on."
)
WRITTEN = (
    "its forward writes {names}, put back before a backward could use what was written: leave out the probes of "
    "curvature that take gradients, and keep critical_sharpness"
)


class PassOver(Exception):
    """A look at curvature ends before its numbers are there."""


class CurvatureRows:
    """Looks at the loss between the optimizer's step and the next forward; the model is afterwards bit for bit what it
    was, and so are training flags and random states.

    ``loss``: the caller's; else what ``reference`` returns. ``every``: rows at which it is looked at. ``batch``:
    "update" for the loss of the batch that each row's update is made of, which ``loss`` returns, or else the model for
    the arguments that it was given in the row.
    """

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        guard: Guard,
        every: CurvatureCadence,
        loss: Callable[[], Any] | None,
        reference: Callable[[], Any] | FirstBatch | None,
        parameters: Parameters,
        ranks: Ranks | None = None,
        batch: CurvatureBatch = "fixed",
        audit: Audit | None = None,
        restore: bool = False,
    ) -> None:
        self.seconds = 0.0
        self.neutrality = NeutralPass("curvature", model, lambda: boards, guard, audit or Audit(), ranks, restore)
        self._model, self._boards, self._guard = model, boards, guard
        self._every: CurvatureCadence = every
        self._loss, self._of_update = loss, batch == "update"
        self._reference: Callable[[], Any] | FirstBatch | UpdateBatch | None = reference
        if self._of_update and boards:
            self._reference = UpdateBatch(model) if loss is None else None
        self._parameters, self._ranks = parameters, ranks
        self._landscape: Landscape | None = None
        self._memory: dict[str, dict[str, Any]] = {board.table.name: {} for board in boards}
        self._started = False
        self._row, self._any = 0, False  # the row, and whether a probe has numbers in it

    def due(self, row: int) -> bool:
        return bool(self._boards) and is_curved(row, self._every)

    def arm(self, row: int) -> None:
        """Prepare a row, before its forwards."""
        if isinstance(self._reference, UpdateBatch):
            self._reference.begin(self.due(row) and not self.neutrality.over)

    def start(self) -> None:
        """Before the optimizer's step of a due row."""
        began = time.perf_counter()
        self._started = False
        if self.neutrality.over:
            return
        if isinstance(self._reference, FirstBatch | UpdateBatch) and self._loss is None and self._reference.refused:
            self.neutrality.end(self._reference.refused)
            return
        if isinstance(self._reference, FirstBatch) and self._loss is None and not self._reference.ready:
            return  # no forward of the whole model came yet
        if isinstance(self._reference, UpdateBatch):
            if not self._reference.ready:
                self._end(UsageError(UNSEEN))
                return
            self._reference.hand_over()
        try:
            if self._landscape is None:
                self._landscape = Landscape(self._model, self._same, self._parameters, self._ranks, self._of_update)
            self._landscape.start()
            self._started = True
        except Exception as error:
            self._end(error)
        self.seconds += time.perf_counter() - began

    def fill(self, record: RowRecord) -> None:
        """Adds the tables, after the step of every optimizer."""
        began = time.perf_counter()
        landscape, started, self._started = self._landscape, self._started, False
        self._row, self._any = record.step, False
        if started and landscape is not None:
            try:
                with evaluation(self._model), with_hooks(), landscape.entered() as moved:
                    for board in self._boards if moved else ():
                        self._look(board, landscape)
            except PassOver:
                pass  # which settle() says
            except Exception as error:
                self._end(error)
        if isinstance(self._reference, UpdateBatch):
            self._reference.release()
        if not self._any:
            self.neutrality.settle()  # first: this row has no numbers
        for board in self._boards:
            record.table(board)
        self.neutrality.settle()
        self.seconds += time.perf_counter() - began

    def skip(self) -> None:
        """No step came."""
        self._started = False
        if isinstance(self._reference, UpdateBatch):
            self._reference.release()

    def close(self) -> None:
        if isinstance(self._reference, UpdateBatch):
            self._reference.close()

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self._memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self._parameters.device
        for name, memory in state["memory"].items():
            if name in self._memory:
                self._memory[name] = {key: _moved(value, device) for key, value in memory.items()}

    def _look(self, board: Board, landscape: Landscape) -> None:
        if board.ended:
            return
        probe = board.probe
        assert isinstance(probe, CurvatureProbe)
        landscape.count = 0
        try:
            numbers = probe.look(landscape, self._memory[board.table.name])
        except PassOver:
            raise
        except Exception as error:
            self._guard(board, error)
            return
        known = {column: numbers.get(column, math.nan) for column in board.rules}
        cells = np.array([[math.isfinite(value) for value in known.values()]])
        ones = {column: (value, 1.0) if math.isfinite(value) else (0.0, 0.0) for column, value in known.items()}
        columns = {
            column: torch.tensor([pair], dtype=torch.float64, device=self._parameters.device)
            for column, pair in ones.items()
        }
        board.collect(Collected(columns, cells))
        self._any = True

    def _same(self) -> Tensor:
        """The loss, drawing the same random numbers each time.

        Raises PassOver where the forward changed the model: it would not be the same loss the next time.
        """
        # parameters and buffers are those of before after each row, see Landscape.entered
        with random_states_kept(self._model), self.neutrality.around(self._row, by_caller=("parameter", "buffer")):
            found = self._told()
        if self.neutrality.over:
            raise PassOver(self.neutrality.over)
        if torch.is_grad_enabled() and (written := self.neutrality.changed):
            raise StabilityLabError(WRITTEN.format(names=listed(written, 3)))
        return found

    def _told(self) -> Tensor:
        if self._loss is not None:
            return _tensor(self._loss(), any_shape=True)
        assert self._reference is not None
        if isinstance(self._reference, FirstBatch | UpdateBatch):
            return torch.stack([_tensor(returned) for returned in self._reference.parts()])
        return _tensor(self._reference())

    def _end(self, error: Exception) -> None:
        for board in self._boards:
            if not board.ended:
                self._guard(board, error)


def _tensor(returned: Any, any_shape: bool = False) -> Tensor:
    """The loss in what a function returned: itself, its ``loss`` or its ["loss"]."""
    found = returned
    if isinstance(returned, Mapping):
        found = returned.get("loss")
    elif not isinstance(returned, Tensor):
        found = getattr(returned, "loss", None)
    if not isinstance(found, Tensor) or not found.is_floating_point() or (found.numel() != 1 and not any_shape):
        raise UsageError(f"curvature {LOSS}.")
    return found if any_shape else found.reshape(())


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [tensor.to(device) for tensor in value]
    return value
