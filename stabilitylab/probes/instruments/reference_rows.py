"""The reference rows: the cadence of the fixed batch, the comparison of outputs, and the state for a resumed run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._engine.board import Board
from .._engine.cadence import REFERENCE_FINENESS, is_due
from .._engine.first_batch import FirstBatch
from .._engine.masks import OF_REFERENCE, are_same
from .._engine.reference_pass import ReferencePass
from .._engine.row import RowRecord
from .._engine.tap_places import Tapped
from .._engine.watched import Watched
from ..library.representations import ModelUpdate, Output, distances
from ..parameters.copies import kept, parameters_set
from .instrument import Instrument
from .loop_checks import LoopChecks
from .training_pass import TrainingRows

OF_TRAINING = (
    "mask= gave the reference pass the mask of the batch that was trained on, so numbers of the reference pass leave "
    f"out the wrong tokens: give {OF_REFERENCE}"
)


@dataclass
class Start:
    """The beginning of the run: its outputs, its alpha and, where alpha has a schedule, a copy of its parameters."""

    outputs: list[Output]
    alpha: float | None = None
    theta: list[torch.Tensor] = field(default_factory=list)


class ReferenceRows(Instrument):
    """Runs the reference pass at due rows, and for its outputs alone at the rows before those (``model_update``).

    ``given``: what is run, the caller's function or the first batch.
    """

    talks = True

    def __init__(self, training: TrainingRows, checks: LoopChecks) -> None:
        self._training, self._checks = training, checks
        self.seconds = 0.0
        self._start: Start | None = None
        self._previous: tuple[int, list[Output]] | None = None

    def open(self, watched: Watched) -> None:
        options = watched.options
        mask = options.mask if options.reference_mask is None else options.reference_mask
        assert watched.reference is not None
        self.given: Callable[[], Any] | FirstBatch
        if isinstance(watched.reference, str):
            passes = self._training.passes
            self.given = FirstBatch(watched.model, passes.masks, passes.trains, lambda: passes.attached)
            mask = self.given.mask
            self._masks = watched.masks(mask)
        else:
            self.given = watched.reference
            self._masks = watched.masks(mask, OF_REFERENCE)
        self._boards: Sequence[Board] = watched.on("reference")
        self._guard, self._options, self._parameters = watched.guard, options, watched.parameters
        self._alone = watched.ranks.alone
        self.neutrality = watched.neutral_pass("reference", lambda: self._boards)
        self._update = next((board for board in self._boards if isinstance(board.probe, ModelUpdate)), None)
        others = [board for board in self._boards if board is not self._update]
        self._pass = ReferencePass(
            watched.model,
            others,
            self._masks,
            watched.guard,
            self.given,
            self._update,
            options.recorder,
            watched.ranks,
        )

    @property
    def boards(self) -> Sequence[Board]:
        return self._boards

    def add(self, board: Board) -> None:
        """Add a board whose places the model shows by ``tap`` alone."""
        self._boards = [*self._boards, board]
        if isinstance(board.probe, ModelUpdate):
            self._update = self._pass.stacks = board
        else:
            self._pass.add(board)

    def tap(self, tapped: Tapped) -> None:
        self._pass.tapped = tapped

    @property
    def order(self) -> dict[tuple[str, int], int]:
        return self._pass.order

    @property
    def refused(self) -> bool:
        """True if no pass comes, since the first batch cannot be copied."""
        return isinstance(self.given, FirstBatch) and bool(self.given.refused)

    def due(self, t: int) -> bool:
        return is_due(t, self._options.update_every, REFERENCE_FINENESS)

    @property
    def ready(self) -> bool:
        """False while the first batch, which the pass is to run on, was not seen."""
        return not isinstance(self.given, FirstBatch) or self.given.ready

    def host(self, row: RowRecord) -> None:
        self._fill(row)
        if self.due(row.step) and not self.refused:
            if self.ready:
                self._checks.look(row.step, "reference", self._boards, self.order)
            else:
                self._checks.no_batch(row.step, self._boards)

    def row_read(self, row: RowRecord) -> None:
        self.neutrality.tell(row)

    def finish(self, row: RowRecord) -> None:
        self._fill(row, last=True)

    def close(self) -> None:
        if isinstance(self.given, FirstBatch):
            self.given.close()

    def _fill(self, record: RowRecord, last: bool = False) -> None:
        """Add the reference tables and metrics to ``record`` if its row is due or the last, or the metrics alone if
        they are wanted without the tables."""
        due = last or self.due(record.step)
        if isinstance(self.given, FirstBatch):
            if self.given.refused:
                self.neutrality.end(self.given.refused)
            elif not self.given.ready:
                return  # no forward of the whole model came yet
        if self.neutrality.over:
            self.neutrality.settle()  # first: this row has no numbers
            self._end_row(record, due)
            return
        wanted = due or self._options.measured(record.step)
        if not wanted and not (self._update and self.due(record.step + 1)):
            return
        began = time.perf_counter()
        try:
            outputs, metrics = self._run(record.step, record=due)
        except Exception as error:
            self._guard.reference(self._boards, error, own=not isinstance(self.given, FirstBatch))
            outputs, metrics = [], {}
        if wanted:
            for name, value in metrics.items():
                record.metric(name, value)
        if due and self._update is not None and not self._update.ended:
            try:
                self._compare(self._update, record.step, outputs)
            except Exception as error:
                if not self._alone:  # other ranks may wait in a pass of their own
                    raise
                self._guard(self._update, error)
        self._end_row(record, due)
        self._previous = (record.step, outputs)
        self.seconds += time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        start, previous = self._start, self._previous
        first = self.given.state_dict() if isinstance(self.given, FirstBatch) else None
        own = {
            "first": first,
            "start": start and {"outputs": _packed(start.outputs), "alpha": start.alpha, "theta": start.theta},
            "previous": previous and (previous[0], _packed(previous[1])),
        }
        return {"reference": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = state["reference"]
        if state is None:
            return
        device, start, previous = self._parameters.device, state["start"], state["previous"]
        if isinstance(self.given, FirstBatch):
            self.given.load_state_dict(state.get("first"), device)
        if start is not None:
            theta = kept([tensor.to(device) for tensor in start["theta"]])
            self._start = Start(_unpacked(start["outputs"], device), start["alpha"], theta)
        if previous is not None:
            self._previous = (previous[0], _unpacked(previous[1], device))

    def _end_row(self, record: RowRecord, due: bool) -> None:
        """Add the tables to a due row. Tables that ended are shipped too, since other ranks may wait for them."""
        for board in self._boards if due else ():
            record.table(board)
        self.neutrality.ship(record, self._parameters.device)
        self.neutrality.settle()

    def _run(self, row: int, record: bool) -> tuple[list[Output], dict[str, Any]]:
        with self.neutrality.around(row, at_once=False):
            found = self._pass.run(record)
        training = self._training.passes.masks
        if self._options.reference_mask is None and training.varies and are_same(self._masks.last, training.last):
            self._checks.warn(row, "mask", OF_TRAINING)
        return found

    def _compare(self, board: Board, row: int, now: list[Output]) -> None:
        alpha = None if self._options.schedule is None else self._options.schedule.get()
        if self._start is None:
            self._start = Start(now, alpha, [] if self._options.schedule is None else kept(self._parameters.tensors))
        moved = distances(now, self._start.outputs)
        numbers = {"cumulative": moved, "parameters": moved, "schedule": [torch.zeros_like(each) for each in moved]}
        if alpha != self._start.alpha:
            with parameters_set(self._parameters.tensors, self._start.theta):
                ramped, _ = self._run(row, record=False)  # theta_0 under this row's alpha
            numbers["parameters"] = distances(now, ramped)
            numbers["schedule"] = distances(ramped, self._start.outputs)
        if self._previous is not None and self._previous[0] == row - 1:
            numbers["one_update"] = distances(now, self._previous[1])
        for raw, values in numbers.items():
            for output, value in zip(now, values, strict=True):
                board.add(raw, [output.row], value.unsqueeze(0), output.weight)


def _packed(outputs: Sequence[Output]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    return [(output.row, output.value, output.weight) for output in outputs]


def _unpacked(packed: Sequence[tuple[int, torch.Tensor, torch.Tensor]], device: torch.device) -> list[Output]:
    return [Output(row, value.to(device), weight.to(device)) for row, value, weight in packed]
