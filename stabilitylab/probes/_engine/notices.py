"""What the watcher says about the loop around it: places that nothing came by, a step() in the wrong place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from ...errors import UsageError, listed
from ..parameters.pieces import Parameters
from .board import Board
from .hooks import forget_compiled
from .scaling import forgotten_scaler
from .training_pass import TrainingPass
from .unseen import missed, say, say_missed, unseen
from .watchable import SPLIT, compiled_modules, split_by_ddp

log = logging.getLogger("stabilitylab")

COMPILED = "the model is compiled already, and will be once more at its next call, with the probes inside."

SHARED = (
    "another model of its class may be compiled without probes, whose code it shares: watch that one too, or give this "
    "one a class of its own (class Watched(Model): pass)"
)


class Notices:
    """Says each thing once, on the first rank alone, or on each stage of a pipeline."""

    def __init__(self, model: nn.Module, first: bool, scaled: bool) -> None:
        self.unseen: dict[str, list[str]] = {}  # table -> places that no call of the first probed rows came by
        self.loop_warnings: list[str] = []  # what was said of step()'s place
        self._model, self._first, self._scaled = model, first, scaled
        self._looked: set[str] = set()  # kinds of pass of which that is known
        self._warned = self._again = self._asked = self._compared = self._waited = False

    def left_out(self, found: Mapping[str, Mapping[str, str]]) -> None:
        """Says which modules have no row, and why, before the first row."""
        self.unseen |= {table: list(places) for table, places in found.items()}
        if self._first:
            say_missed(None, found)

    def compiled(self) -> bool:
        """Whether parts of the model are compiled; what was compiled before the hooks came is compiled anew."""
        found = bool(compiled_modules(self._model))
        if found and split_by_ddp(self._model):
            raise UsageError(f"{SPLIT}.")
        if found and forget_compiled() and self._first:
            log.info("%s", COMPILED)
        return found

    def look(self, row: int, which: str, boards: Sequence[Board], called: Mapping[tuple[str, int], int]) -> None:
        """Once for each kind of pass: which places it did not come by."""
        if which in self._looked:
            return
        self._looked.add(which)
        if found := unseen(boards, called):
            self.unseen |= {table: [*self.unseen.get(table, []), *places] for table, places in found.items()}
            if self._first:
                say(row, which, found)
        if without := missed(boards):
            self.unseen |= {table: [*self.unseen.get(table, []), *places] for table, places in without.items()}
            if self._first:
                say_missed(row, without)

    def no_batch(self, row: int, training: TrainingPass, boards: Sequence[Board]) -> None:
        """Says once why no first batch was kept for the reference pass; ``boards``: those that wait for it."""
        if self._waited or not boards:
            return
        self._waited = True
        self.unseen |= {table: [*self.unseen.get(table, []), *places] for table, places in unseen(boards, {}).items()}
        if training.compiled:
            why = "the model runs inside a compiled function, where its arguments are not seen"
        elif training.called:
            why = "only parts of the model were called, in training mode with gradients on, and not the model itself"
        else:
            why = "no forward of the model in training mode with gradients on was seen"
        self._say(
            f"row {row}: the reference pass has no batch, since {why}: give reference=, a function that runs the model "
            "on a fixed batch"
        )

    def apart(self, row: int, parameters: Parameters) -> None:
        """Warns once of replicas that tensor-parallel ranks do not keep alike."""
        if self._compared:
            return
        self._compared = True
        if (names := parameters.apart()) and self._first:
            log.warning(
                "row %d: the gradient of %s differs between tensor-parallel ranks, each of which has all of it, so "
                "they train apart: give it a place in the plan of parallelize_module.",
                row,
                listed(names, 1),
            )

    def loop(
        self,
        row: int,
        training: TrainingPass,
        parameters: Parameters,
        boards: Sequence[Board],
        total: bool,
        early: bool,
    ) -> None:
        """Warns of a loop in which step() stands in the wrong place, or that never trains; ``boards``: all of them,
        ``total``: the norm of the whole gradient is recorded, ``early``: the optimizer's step came before the first
        row."""
        missed = bool(training.boards) and not training.called and not training.left_out
        compiled = missed and bool(compiled_modules(self._model))
        if compiled and not self._again and forget_compiled():
            self._again = True
            training.stay()
            if self._first:
                log.warning("row %d: the forward pass was not seen, since %s", row, COMPILED)
            return
        if compiled and self._again and not self._warned:
            self._tell(row, f"the forward pass was not seen again: {SHARED}")
        if self._warned:
            return
        if not self._scaled and not self._asked and (warning := forgotten_scaler(boards, parameters, total)):
            self._tell(row, warning)
        self._asked = True
        if not parameters.have_gradients:
            self._tell(row, _no_gradient(parameters))
        elif training.boards and not training.called:
            self._tell(
                row,
                f"there is no number of the forward pass: {SPLIT}"
                if training.left_out
                else "there is no number of the forward pass: watch sees forwards in training mode with gradients on, "
                "so call model.train() before them, and step() after each backward; and a model that torch.compile has "
                "run already as what torch.compile returned",
            )
        elif early:
            self._tell(
                row,
                "the optimizer's step came before this one: call step() after backward and before optimizer.step",
            )

    def warn(self, row: int, text: str) -> None:
        """Warns of what showed once the row was read, unless something else was wrong before."""
        if not self._warned:
            self._tell(row, text)

    def never(self) -> None:
        """Warns of a loop that has ended without a row."""
        self._say(
            "step() was never called: no update is recorded; call step(loss=loss) once per update, after backward and "
            "before optimizer.step"
        )

    def _tell(self, row: int, text: str) -> None:
        self._warned = True
        self._say(f"row {row}: {text.rstrip('.')}")

    def _say(self, text: str) -> None:
        self.loop_warnings.append(text)
        if self._first:
            log.warning("%s.", self.loop_warnings[-1])


def unlike(row: int, names: Sequence[str]) -> str:
    """The reason why gradients of copies cannot be added up over ranks."""
    return (
        f"row {row}: the gradient of {listed(names, 2)} differs between ranks that should have the same, so no norm of "
        "parameters or gradients is that of one model: call step() after gradients are averaged over ranks; if "
        "parameters are split over ranks, give share=, a function that returns their process group"
    )


def _no_gradient(parameters: Parameters) -> str:
    if any(getattr(tensor, "_post_accumulate_grad_hooks", None) for tensor in parameters.originals):
        return (
            "no parameter has a gradient after backward, since the optimizer steps inside it: give optimizer=None and "
            "probes='-grad_norm'; what activations and their gradients tell is recorded"
        )
    return "no parameter has a gradient: call step() after backward and before zero_grad"
