"""The rows of the training pass: when hooks are on the model, and what they measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...errors import UsageError
from .._engine.backwards import Backwards
from .._engine.board import Board
from .._engine.hooks import forget_compiled
from .._engine.outside import OutsideResiduals
from .._engine.row import RowRecord
from .._engine.training_pass import TrainingPass
from .._engine.watchable import SPLIT, compiled_modules, split_by_ddp
from .._engine.watched import Watched
from .instrument import Instrument, Moment

log = logging.getLogger("stabilitylab")

COMPILED = "the model is compiled already, and will be once more at its next call, with the probes inside."


class TrainingRows(Instrument):
    """Puts hooks on the model while the coming row is probed, and takes them away, at no cost, while it is not.

    ``passes``: the hooks. ``is_compiled``: parts of the model were compiled before the watch.
    """

    def open(self, watched: Watched) -> None:
        self._watched = watched
        self.passes = TrainingPass(
            watched.model,
            watched.on("forward", "backward"),
            watched.masks(watched.options.mask),
            watched.guard,
            watched.scaler,
            watched.ranks,
            watched.clean,
            watched.options.recorder is not None,
        )
        if watched.stages is None and watched.options.recorder is None:  # whose loops are known
            parameters = watched.parameters
            self.passes.backwards = Backwards(lambda: parameters.originals, watched.ranks.alone, parameters.stepped)
            self.passes.backwards.on_reach = self.passes.reach
            self.passes.backwards.on_pass = self.passes.note_reached
            self.passes.backwards.on_first.append(self.passes.forget_gradients)
        self.passes.residuals = OutsideResiduals(watched.sites.layers, watched.leave_out)
        self.is_compiled = self._compiled()
        if self.is_compiled:
            self.passes.stay()

    @property
    def boards(self) -> Sequence[Board]:
        return self._watched.on("forward", "backward")

    def before_forward(self, t: int) -> None:
        self.passes.start_row()
        if self._watched.due(t):
            self.passes.attach()
        else:
            self.passes.detach()

    def after_backward(self, row: RowRecord) -> None:
        if not self._watched.due(row.step):
            return
        self.passes.end()
        if self.passes.twice:
            self._apart(row.step)
        for board in self.boards:
            row.table(board)
        for name, clean in (self._watched.clean.take(self.boards) if self._watched.clean else {}).items():
            row.set_aside("clean", name, clean)

    def end_pass(self, more: bool) -> None:
        """Add up what a micro-batch has left, before ``step`` does."""
        if self.passes.attached:
            self.passes.end(more)

    def _apart(self, row: int) -> None:
        """Drop this row's gradients of activations, since two backwards went through one forward. From the next row on
        the gradients of each value are added up before they are measured."""
        boards = self._watched.on("backward")
        for board in boards:
            board.clear()
        if not self.passes.adding and self._watched.first:
            log.warning(
                "row %d: more than one backward went through a forward, so this row has no gradients of activations "
                "(%s); from the next on, those of one value are added before they are measured, which takes the memory "
                "of all of them.",
                row,
                ", ".join(board.table.name for board in boards),
            )
        self.passes.adding = True

    def close(self) -> None:
        self.passes.close()

    def share(self, moment: Moment, row: RowRecord) -> Sequence[Board]:
        return self.boards if moment == "after_backward" and self._watched.due(row.step) else ()

    def _compiled(self) -> bool:
        """Return True if parts of the model are compiled. Code from before the hooks came is compiled anew."""
        found = bool(compiled_modules(self._watched.model))
        if found and split_by_ddp(self._watched.model):
            raise UsageError(f"{SPLIT}.")
        if found and forget_compiled() and self._watched.first:
            log.info("%s", COMPILED)
        return found
