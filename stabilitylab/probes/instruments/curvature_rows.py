"""The rows of curvature: when the loss around theta_t is looked at, on which batch, and what a resumed run needs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import StabilityLabError, UsageError, listed
from .._engine.board import Board
from .._engine.cadence import CurvatureCadence, is_curved
from .._engine.evaluation import evaluation, random_states_kept
from .._engine.first_batch import FirstBatch
from .._engine.row import RowRecord
from .._engine.selection import LOSS
from .._engine.update_batch import UpdateBatch
from .._engine.watchable import with_hooks
from .._engine.watched import Watched
from ..base import Collected, CurvatureProbe
from ..curvature.landscape import Landscape
from .instrument import Instrument
from .reference_rows import ReferenceRows
from .training_pass import TrainingRows

UNSEEN = (
    "curvature_batch='update' saw no training forward of the whole model: call the model itself, or give "
    "curvature_loss=, a function that returns the loss of the batch that was trained on."
)
WRITTEN = (
    "its forward writes {names}, put back before a backward could use what was written: leave out the probes of "
    "curvature that take gradients, and keep critical_sharpness"
)


class PassOver(Exception):
    """The end of a look at curvature before its numbers are there."""


class CurvatureRows(Instrument):
    """The look at the loss between the optimizer's step and the next forward. Afterwards the model, training flags and
    random states are bit for bit what they were.

    The loss is that of the caller's ``curvature_loss``, or else the loss that the reference pass returns. With
    ``curvature_batch="update"`` it is the loss of the batch of each row's update: that of ``curvature_loss``, or else
    the loss that the model returns for the arguments of the row's forwards.
    """

    talks = True

    def __init__(self, training: TrainingRows, reference: ReferenceRows | None) -> None:
        self._training, self._given = training, reference
        self.seconds = 0.0
        self._landscape: Landscape | None = None
        self._started = False
        self._row, self._any = 0, False  # the row, and whether a probe has numbers in it

    def open(self, watched: Watched) -> None:
        options, model = watched.options, watched.model
        self._boards = boards = watched.on("curvature")
        self.neutrality = watched.neutral_pass("curvature", lambda: boards)
        self._model, self._parameters = model, watched.parameters
        self._guard, self._ranks = watched.guard, watched.ranks
        self._every: CurvatureCadence = options.curvature_every
        self._loss, self._of_update = options.curvature_loss, options.curvature_batch == "update"
        # what returns the loss if the caller gives no function for it
        self._reference: Callable[[], Any] | FirstBatch | UpdateBatch | None = None
        if self._loss is None and self._of_update and boards:
            passes = self._training.passes
            self._reference = batch = UpdateBatch(model, passes.trains)
            passes.on_choice.append(batch.keep)
        elif self._loss is None and self._given is not None:
            self._reference = self._given.given
        self._memory: dict[str, dict[str, Any]] = {board.table.name: {} for board in boards}

    @property
    def boards(self) -> Sequence[Board]:
        return self._boards

    def due(self, t: int) -> bool:
        return bool(self._boards) and is_curved(t, self._every)

    def before_forward(self, t: int) -> None:
        if isinstance(self._reference, UpdateBatch):
            self._reference.begin(self.due(t) and not self.neutrality.over)

    def host(self, row: RowRecord) -> None:
        if self.due(row.step):
            row.owe()
            self._start()

    def host_after_update(self, row: RowRecord) -> None:
        if self.due(row.step):
            self._fill(row)

    def skipped(self, row: RowRecord) -> None:
        self._skip()

    def abort(self) -> None:
        self._skip()

    def _start(self) -> None:
        """Keep what the look needs, before the optimizer's step of a due row."""
        began = time.perf_counter()
        self._started = False
        if self.neutrality.over:
            return
        if isinstance(self._reference, FirstBatch | UpdateBatch) and self._reference.refused:
            self.neutrality.end(self._reference.refused)
            return
        if isinstance(self._reference, FirstBatch) and not self._reference.ready:
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

    def _fill(self, record: RowRecord) -> None:
        """Add the tables, after the step of every optimizer."""
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

    def _skip(self) -> None:
        """Drop the row, since the optimizer never stepped."""
        self._started = False
        if isinstance(self._reference, UpdateBatch):
            self._reference.release()

    def close(self) -> None:
        if isinstance(self._reference, UpdateBatch):
            self._reference.close()

    def state_dict(self) -> dict[str, Any]:
        return {"curvature": {"memory": self._memory}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device, known = self._parameters.device, state.get("curvature") or {"memory": {}}
        for name, memory in known["memory"].items():
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
        """Return the loss, with the same random numbers each time.

        Raises PassOver if the forward changed the model, since the next loss would be another one.
        """
        # Landscape.entered restores parameters and buffers after each row
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
    """Return the loss in what a function returned: the value itself, its ``loss`` or its ["loss"]."""
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
