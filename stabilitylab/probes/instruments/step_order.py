"""The check of the order in which a loop calls the forward pass, the backward pass, step() and its optimizers."""

from __future__ import annotations

import heapq
from typing import Any

import torch

from .._engine.hooks import RootHook
from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..parameters.layouts import local
from ..state.bits import version
from .instrument import Instrument
from .loop_checks import LoopChecks
from .training_pass import TrainingRows

AGAIN = (
    "step() was called again before the optimizer stepped, as at row {first}, while gradients are added up: rows are "
    "then parts of an update; call step() once per update, after the backward of its last micro-batch"
)
UNSEEN = (
    "the optimizer stepped twice with no step() in between, as at row {first}: the second update has no row; call "
    "step(loss=loss) in each update, after backward and before optimizer.step"
)
MOVED = (
    "parameters moved between the first forward pass of an update and step(), as in the first half of SAM: numbers of "
    "the update then start elsewhere than at theta_t; call step() after the first backward, before parameters move"
)
WITNESSES = 4  # gradients, or parameters, that are compared: the smallest, whose copies cost no memory
LOOKS = 8  # rows in turn in good order, after which the loop is taken to go on so


class StepOrder(Instrument):
    """Warnings of a step() in each micro-batch, of an update without one, and of one that comes once parameters have
    moved. An update is known by its optimizers' steps. A scaler skips steps, so nothing is checked with a scaler.

    The comparison of parameters is one number on the device, which travels with its row.
    """

    def __init__(self, training: TrainingRows, checks: LoopChecks) -> None:
        self._training, self._checks = training, checks
        self._coming = 0  # the row whose forward comes next
        self._begun = False  # step() was called
        self._stepped: set[int] = set()  # optimizers that stepped since the last step()
        self._gradients: list[tuple[torch.Tensor, torch.Tensor, int | None]] = []  # parameter, gradient, writes to it
        self._wrong: dict[str, list[int]] = {"again": [], "unseen": []}  # the rows with a wrong order
        self._right = 0  # rows in turn before which an optimizer stepped, or gradients were begun anew
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and copies of the row's first forward
        self._has_forward = False  # they are of a forward of this row
        self._compared = 0  # rows whose parameters were
        self._hook: Any = None

    def open(self, watched: Watched) -> None:
        self._watched = watched
        # what is recorded for replays is a loop of ours
        ours = watched.options.recorder is not None or watched.scaled or watched.stages is not None
        self._wanted = bool(watched.optimizers) and not ours

    def before_forward(self, t: int) -> None:
        self._coming = t
        if not self._first and not self._begun:
            self._copy()  # for a loop that calls parts of the model alone; later an optimizer steps after this
        self.close()
        looks = self._wanted and self._compared < LOOKS and self._watched.due(t)
        if looks and not self._training.is_compiled:  # whose code would be compiled anew once the hook is gone
            self._hook = self._watched.model.register_forward_pre_hook(RootHook(self._forward_begins))

    def _forward_begins(self, *given: object) -> None:
        if not self._has_forward and self._training.passes.trains():
            self._has_forward = True
            self._copy()

    def _copy(self) -> None:
        if self._wanted and self._compared < LOOKS:
            held = (p for one in self._watched.optimizers for group in one.param_groups for p in group["params"])
            few = heapq.nsmallest(WITNESSES, held, key=torch.Tensor.numel)
            self._first = [(p, local(p).detach().clone()) for p in few]

    def after_step(self, number: int) -> None:
        self._first, self._has_forward = [], False  # the passes before belong to the update that was made
        if self._wanted and self._begun and not self._training.passes.paused:
            if number in self._stepped:
                self._disorder("unseen", self._coming - 1, UNSEEN)
            self._stepped.add(number)

    def after_backward(self, row: RowRecord) -> None:
        if self._wanted and self._right < LOOKS:
            self._look_for_micro_batches(row.step)
        self._stepped.clear()
        if self._first:
            row.set_aside("moved", "parameters", self._moved())
            self._first, self._compared = [], self._compared + 1
        self._begun, self._has_forward = True, False

    def row_read(self, row: RowRecord) -> None:
        if (moved := row.aside["moved"].get("parameters")) is not None and moved[0]:
            self._checks.warn(row.step, "moved", MOVED)

    def finish(self, row: RowRecord) -> None:
        self._wanted = False  # training may go on without rows

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _moved(self) -> torch.Tensor:  # (1,)
        """Return 1 if a parameter is another number than at the row's first forward, else 0."""
        device = self._watched.parameters.device
        with torch.no_grad():
            apart = [((p != was) & (p == p)).any().to(device) for p, was in ((local(p), was) for p, was in self._first)]
            return torch.stack(apart).any().double().view(1)

    def _look_for_micro_batches(self, row: int) -> None:
        """Look for a step() since which no optimizer has stepped, and after which one backward at most came to the same
        gradients. (Where they were zeroed in between, there are two writes to them, or they are others.)"""
        again = bool(self._gradients) and not self._stepped
        if again and all(p.grad is g and (version(g) or 0) <= (writes or 0) + 1 for p, g, writes in self._gradients):
            self._right = 0
            self._disorder("again", row, AGAIN)
        else:
            self._right += self._begun
        held = ((p, p.grad) for p in self._watched.parameters.originals if p.grad is not None)
        few = heapq.nsmallest(WITNESSES, held, key=lambda pair: pair[0].numel()) if self._right < LOOKS else ()
        self._gradients = [(p, g, version(g)) for p, g in few]

    def _disorder(self, kind: str, row: int, text: str) -> None:
        """Warn of the second row whose step() and optimizer step are in a wrong order: one alone may be meant."""
        rows = self._wrong[kind]
        if row not in rows[-1:]:
            rows.append(row)
            if len(rows) == 2:
                self._checks.warn(row, kind, text.format(first=rows[0]))
