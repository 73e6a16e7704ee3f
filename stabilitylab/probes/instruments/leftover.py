"""The check of gradients that are left from the update before when the next backward begins."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._engine.row import RowRecord
from .._engine.watched import Watched
from ..parameters.layouts import local
from .instrument import Instrument
from .loop_checks import LoopChecks
from .training_pass import TrainingRows

WITNESSES = 4  # parameters that are looked at, the smallest: what is held of them costs no memory
LOOKS = 8  # after so many looks that found only zeros, the loop is taken to zero its gradients


@dataclass(frozen=True)
class Witness:
    """A parameter and its gradient as an update left them. ``moved``: True if a known optimizer has stepped; for other
    optimizers the version of the parameter shows it. ``alone``: True if no optimizer holds the parameter."""

    parameter: torch.Tensor
    version: int
    gradient: torch.Tensor
    written: int
    moved: bool
    alone: bool = False

    def left(self) -> bool:
        """True if that gradient is still the parameter's, with at most one write since: a clipping, a zeroing (which
        its value tells), or the first gradient that is added to it."""
        same = self.parameter.grad is self.gradient and self.gradient._version <= self.written + 1
        return same and (self.moved or self.parameter._version > self.version)


class LeftoverGradients(Instrument):
    """The look for leftover gradients when a backward reaches the model's output. A look before the forward would be
    too early, since many loops call ``zero_grad`` between forward and backward. A later look would be too late: the
    first gradient is added to what was left.

    The result is one number on the device, which travels with its row. The looks end for good once no gradient is left.
    """

    def __init__(self, training: TrainingRows, checks: LoopChecks) -> None:
        self._training, self._checks = training, checks
        self._witnesses: list[Witness] = []
        self._found: torch.Tensor | None = None
        self._rows: list[int] = []  # where gradients were left
        self._zeros = 0
        self._remedy = "call optimizer.zero_grad() in each update"
        self._ended = False  # a row has ended, and the next one has not begun

    def open(self, watched: Watched) -> None:
        self._watched, self._parameters = watched, watched.parameters
        # what is recorded for replays is a loop of ours
        ours = watched.options.recorder is not None
        self.wanted = not ours and watched.stages is None and not self._training.is_compiled
        if self.wanted and self._training.passes.backwards is not None:
            self._training.passes.backwards.on_begin.append(self._look)
            self._training.passes.on_thrown.append(self._forget)

    def before_forward(self, t: int) -> None:
        if self._ended and not self._watched.optimizers and self._training.passes.attached:
            self._note()
        self._ended = False

    def after_step(self, number: int) -> None:
        if self._training.passes.attached:
            self._note(number)

    def after_backward(self, row: RowRecord) -> None:
        """Add what was found to the row. An optimizer that steps now and then is looked at after its steps alone."""
        if self._found is not None and self._watched.due(row.step):
            row.set_aside("left", "gradients", self._found)
        self._found = None
        self._witnesses.clear()
        self._ended = True

    def row_read(self, row: RowRecord) -> None:
        if warning := self._wrong(row.step, row.aside["left"]):
            self._checks.warn(row.step, "leftover", warning)

    def _note(self, number: int | None = None) -> None:
        """Keep witnesses once the optimizer of this number has stepped; None: before an unknown optimizer steps."""
        if not self.wanted:
            return
        if number is None:
            self._keep(self._parameters.originals, moved=False)
            return
        groups = self._parameters.optimizers[number].param_groups
        self._keep([p for group in groups for p in group["params"]], moved=True)
        if number == 0:
            self._keep(self._without_optimizer(), moved=True, alone=True)

    def _keep(self, parameters: Sequence[torch.Tensor], *, moved: bool, alone: bool = False) -> None:
        """Keep the smallest of these parameters as witnesses."""
        held = (p for p in parameters if p.grad is not None and p.grad.layout == torch.strided)
        for p in heapq.nsmallest(WITNESSES, held, key=lambda p: p.numel()):
            if (gradient := p.grad) is not None:
                self._witnesses.append(Witness(p, p._version, gradient, gradient._version, moved, alone))

    def _without_optimizer(self) -> list[torch.Tensor]:
        """Return the parameters that no optimizer holds: ``optimizer.zero_grad()`` does not reach them. None where the
        optimizers hold other tensors than the model's own."""
        groups = [group for optimizer in self._parameters.optimizers for group in optimizer.param_groups]
        held = {id(p) for group in groups for p in group["params"]}
        rest = [p for p in self._parameters.originals if id(p) not in held]
        return rest if len(rest) < len(self._parameters.originals) else []

    def _forget(self) -> None:
        """Forget what was found: it belongs to passes that no update follows, whose gradients are gone."""
        self._found = None

    def _wrong(self, row: int, left: Mapping[str, Any]) -> str:
        """Return a warning at the second look in a row that found gradients, by the number that has come with a row;
        else ""."""
        if not self.wanted or "gradients" not in left:
            return ""
        if not left["gradients"][0]:
            self._zeros, self._rows = self._zeros + 1, []
            self.wanted = self._zeros < LOOKS
            return ""
        self._rows.append(row)
        if len(self._rows) < 2:
            return ""
        self.wanted = False
        return (
            f"gradients of the update before were still there when backward began, as at row {self._rows[0]}, so that "
            f"the new ones were added to them: if that is not meant, {self._remedy}"
        )

    def _look(self) -> None:
        """Count the entries that are not 0 of gradients that were left: a backward has reached what the model
        returned."""
        if self._found is not None or not self._witnesses or not self.wanted:
            return
        left = [witness for witness in self._witnesses if witness.left()]
        self.wanted = bool(left)
        if left and all(witness.alone for witness in left):
            self._remedy = "call model.zero_grad() in each update, since parameters are in no optimizer"
        with torch.no_grad():
            for gradient in (local(witness.gradient) for witness in left):
                found = gradient.count_nonzero().to(self._parameters.device, torch.float64).view(1)
                self._found = found if self._found is None else self._found + found
