"""The checks of the loop around a watcher: places that no pass reached, and a step() in the wrong place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .._engine.board import Board
from .._engine.hooks import forget_compiled
from .._engine.row import RowRecord
from .._engine.scaling import forgotten_scaler
from .._engine.selection import chosen, left_out
from .._engine.unreached import missed, say, say_missed, unseen
from .._engine.watchable import SPLIT, compiled_modules
from .._engine.watched import Watched
from ..parameters.pieces import Parameters
from .instrument import Instrument
from .training_pass import COMPILED, TrainingRows

log = logging.getLogger("stabilitylab")

SHARED = (
    "another model of its class may be compiled without probes, whose code it shares: watch that one too, or give this "
    "one a class of its own (class Watched(Model): pass)"
)

TRANSFORMED = (
    "forward passes inside a transform of torch.func (grad, vmap, jvp) are not recorded, so the row has no activations "
    "of theirs: call the model outside of the transform, or put the transform into a block of watcher.off()"
)

OUTSIDE = (
    "modules that the model had called were called outside of its own forward too, as another model does that shares "
    "them: these calls are not recorded; if they belong to the update, call the modules in the forward of the model"
)


OTHERS = (
    "no parameter of the model is in optimizer=, so that its updates are not recorded, or are those of another model: "
    "give the optimizer that trains this model, if it holds no copies of its own"
)


class LoopChecks(Instrument):
    """Warnings about the loop. Each is given once, on the first rank alone, or on each stage of a pipeline.

    ``unseen``: table -> places that have no number: no call reached them in the first probed row, or their number
    cannot be measured. A place that is called later leaves the list. ``warnings``: what was said of the loop.
    ``early``: an optimizer stepped before the first row.
    """

    def __init__(self, training: TrainingRows) -> None:
        self._training = training
        self.unseen: dict[str, list[str]] = {}
        self._uncalled: dict[str, dict[int, str]] = {}  # of ``unseen``, the places that may be called yet, by row
        self.warnings: list[str] = []
        self.early = False
        self._coming = 0  # the row whose forward comes next
        self._begun = False  # step() was called
        self._looked: set[str] = set()  # kinds of pass whose unreached places are known
        self._told: set[str] = set()  # kinds of warnings
        self._compiled_anew = self._sought_scaler = False

    @property
    def has_looked(self) -> bool:
        """True once a probed row has shown which places are called."""
        return bool(self._looked)

    def open(self, watched: Watched) -> None:
        self._watched = watched
        self._note_missed(None, left_out(watched.sites, chosen(watched.options.probes)))
        if watched.optimizers and not watched.ranks.late:
            held = {id(one) for optimizer in watched.optimizers for g in optimizer.param_groups for one in g["params"]}
            if not any(id(tensor) in held for tensor in watched.parameters.originals):
                self._say(OTHERS)
                self._told.add("others")

    def before_forward(self, t: int) -> None:
        self._coming = t

    def after_step(self, number: int) -> None:
        self.early |= self._coming == 0 and not self._begun

    def after_backward(self, row: RowRecord) -> None:
        self._begun = True
        training = self._training.passes
        if self._watched.in_turn(row.step):
            self._look_at_loop(row.step)
        if self._watched.due(row.step) and training.order:  # else there was no forward pass to be seen, as was said
            self.look(row.step, "training", self._training.boards, training.order)

    def look(self, row: int, which: str, boards: Sequence[Board], called: Mapping[tuple[str, int], int]) -> None:
        """Name the places that a pass did not reach, once for each kind of pass."""
        if which in self._looked:
            return
        self._looked.add(which)
        if found := unseen(boards, called):
            self._note_uncalled(found)
            if self._watched.first:
                say(row, which, {table: list(places.values()) for table, places in found.items()})
        if without := missed(boards):
            self._note_missed(row, without)

    def no_batch(self, row: int, boards: Sequence[Board]) -> None:
        """Say once why no first batch was kept for the reference pass. ``boards``: the tables that wait for it."""
        if "no batch" in self._told or not boards:
            return
        self._note_uncalled(unseen(boards, {}))
        if self._training.passes.compiled:
            why = "the model runs inside a compiled function, where its arguments are not seen"
        elif self._training.passes.transformed:
            why = "the model ran inside a transform of torch.func alone, where its arguments are not seen"
        elif self._training.passes.called:
            why = "only parts of the model were called, in training mode with gradients on, and not the model itself"
        else:
            why = "no forward of the model in training mode with gradients on was seen"
        self.warn(
            row,
            "no batch",
            f"the reference pass has no batch, since {why}: give reference=, a function that runs the model on a fixed "
            "batch",
        )

    def has_told(self, kind: str) -> bool:
        """Return True if a warning of this kind was given."""
        return kind in self._told

    def warn(self, row: int, kind: str, text: str) -> None:
        """Warn of what is wrong in the loop, once for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            self._say(f"row {row}: {text.rstrip('.')}")

    def row_read(self, row: RowRecord) -> None:
        """Take the places that have a number in this row from the list of places without one."""
        if not self._uncalled:
            return
        for table, cells in row.read()[1].items():
            places = self._uncalled.get(table, {})
            for number in [number for number in places if not cells.absent[number]]:
                self.unseen[table].remove(places.pop(number))
            if not places:
                self._uncalled.pop(table, None)
            if not self.unseen.get(table, True):
                del self.unseen[table]

    def finish(self, row: RowRecord) -> None:
        if not row.step:
            self._say(
                "step() was never called: no update is recorded; call step(loss=loss) once per update, after backward "
                "and before optimizer.step"
            )

    def _look_at_loop(self, row: int) -> None:
        """Warn of a loop in which step() stands in the wrong place, or that never trains."""
        training, watched, parameters = self._training.passes, self._watched, self._watched.parameters
        missed = bool(training.boards) and not training.called and not training.left_out
        compiled = missed and bool(compiled_modules(watched.model))
        if compiled and not self._compiled_anew and forget_compiled():
            self._compiled_anew = True
            training.stay()
            if watched.first:
                log.warning("row %d: the forward pass was not seen, since %s", row, COMPILED)
            return
        if not watched.scaled and not self._sought_scaler:
            self._sought_scaler = True
            if warning := forgotten_scaler(watched.boards, parameters, watched.total):
                self.warn(row, "scaler", warning)
        if training.outside:
            self.warn(row, "outside", OUTSIDE)
        if training.transformed:
            self.warn(row, "transformed", TRANSFORMED)
        if training.skipped and "skipped" not in self._told:
            self._told.add("skipped")
            if watched.first:
                log.info("row %d: a forward pass that had no backward is left out, as are later ones.", row)
        if not parameters.have_gradients:
            self.warn(row, "no gradient", _no_gradient(parameters))
        elif compiled and self._compiled_anew:
            self.warn(row, "no forward", f"the forward pass was not seen again: {SHARED}")
        elif training.boards and not training.called and not training.transformed:
            self.warn(
                row,
                "no forward",
                f"there is no number of the forward pass: {SPLIT}"
                if training.left_out
                else "there is no number of the forward pass: watch sees forwards in training mode with gradients on, "
                "so call model.train() before them, and step() after each backward; and a model that torch.compile has "
                "run already as what torch.compile returned",
            )
        elif self.early:
            self.warn(
                row,
                "early",
                "the optimizer's step came before this one: call step() after backward and before optimizer.step",
            )

    def _note(self, found: Mapping[str, Sequence[str]]) -> None:
        self.unseen |= {table: [*self.unseen.get(table, []), *places] for table, places in found.items()}

    def _note_uncalled(self, found: Mapping[str, Mapping[int, str]]) -> None:
        self._note({table: list(places.values()) for table, places in found.items()})
        for table, places in found.items():
            self._uncalled[table] = {**self._uncalled.get(table, {}), **places}

    def _note_missed(self, row: int | None, found: Mapping[str, Mapping[str, str]]) -> None:
        """Note modules that have no number, each with the reason."""
        self._note({table: list(places) for table, places in found.items()})
        if self._watched.first:
            say_missed(row, found)

    def _say(self, text: str) -> None:
        self.warnings.append(text)
        if self._watched.first:
            log.warning("%s.", self.warnings[-1])


def _no_gradient(parameters: Parameters) -> str:
    if any(getattr(tensor, "_post_accumulate_grad_hooks", None) for tensor in parameters.originals):
        return (
            "no parameter has a gradient after backward, since the optimizer steps inside it: give optimizer=None and "
            "probes='-grad_norm'; what activations and their gradients tell is recorded"
        )
    return "no parameter has a gradient: call step() after backward and before zero_grad"
