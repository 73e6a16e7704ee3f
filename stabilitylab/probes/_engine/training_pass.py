"""The training pass, recorded on the caller's own forwards and backwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import nn

from ..base import wide
from ..parameters.processes import Processes
from ..places.sites import Parts
from .backwards import Backwards
from .board import Board, CleanPasses
from .guard import Guard
from .hooks import Hook, Value, in_backward
from .masks import Masks
from .outside import OutsideResiduals
from .passes import Pass, Wanted
from .watchable import compiled_modules

PARTIAL = "is a view into which a later module writes, so that a part of its gradient passes by"


class ComingGradient:
    """The gradient of one value in one forward, in the pass of this ``number``. It comes with each backward through
    that forward, from each of the value's ``parts``, whose gradients are added up."""

    def __init__(self, to: TrainingPass, wanted: Wanted, weight: torch.Tensor, number: int, parts: int = 1) -> None:
        self._to, self.wanted, self.weight, self.number, self.parts = to, wanted, weight, number, parts
        self.partial = False  # something wrote into the value, a view: a part of its gradient passes by
        self.row = -1  # in which it came last
        self.came = 0  # how many times in that row
        self.sum: torch.Tensor | None = None

    def __call__(self, gradient: torch.Tensor) -> None:
        self._to.receive(self, gradient)


class CompiledGradients:
    """The gradients of one value in compiled code, which come without their forward: in each backward one for each
    call since the last backward, the last call first. ``weights``: of these calls. ``sums``: of the gradients, if
    several backwards go through these calls."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.weights: list[torch.Tensor] = []
        self.sums: dict[int, torch.Tensor] = {}  # call -> sum
        self.came = 0

    def of_call(self) -> int:
        """Return the call to which the gradient belongs that comes now."""
        self.came += 1
        return len(self.weights) - 1 - (self.came - 1) % len(self.weights)

    def take(self) -> dict[int, torch.Tensor]:
        sums, self.sums = self.sums, {}
        return sums

    def forget(self) -> None:
        self.sums, self.came = {}, 0


class TrainingPass(Pass):
    """The pass that records forwards of the model in training mode with gradients on, and gradients of their
    activations.

    ``paused`` leaves out all that runs meanwhile. Where a gradient comes twice, by two backwards through one forward,
    ``twice`` says so of the row; with ``adding`` the gradients of each value are added up before they are measured.
    ``residuals`` finds layers that return a branch. ``backwards`` tells which backwards lead to the update, None: all;
    ``discarded`` counts how often gradients of a row were thrown away.

    A pass whose forward no backward has reached by the end of the row, although one has reached another's, is not of
    the update: a batch that the loop left out. Its numbers stand apart until that is known; ``skipped`` counts such
    forwards.

    A forward that runs inside a backward is a recomputation (activation checkpointing): it counts only for sites that
    had no ordinary forward since ``start_row``: the sites that reentrant checkpointing first runs without gradients.
    """

    backwards: Backwards | None = None
    residuals: OutsideResiduals | None = None
    paused = False
    adding = twice = False
    outside = False  # a module was called by the model in this row, and then by something else, which is left out
    transformed = False  # a call in this row was inside a transform of torch.func
    discarded = skipped = 0

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        guard: Guard,
        scaler: torch.amp.GradScaler | None,
        ranks: Processes,
        clean: CleanPasses | None,
        together: bool,
    ) -> None:
        super().__init__(model, boards, masks, guard, ranks, together)
        self._clean, self._recorded = clean, False
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._compiled: dict[tuple[Board, int], CompiledGradients] = {}
        self.compiled = False  # a call came from compiled code
        self._row = 0  # counts rows
        self._views: list[tuple[ref[torch.Tensor], int, ComingGradient]] = []  # whose gradients are to come
        self._sums: list[ComingGradient] = []
        self._on_leaves: dict[tuple[Board, int, int], Any] = {}  # (board, row, id of a leaf) -> its hook of this row
        self._ended: list[int] = []  # the passes of the forwards of the model that ended in this row
        self._listening: set[int] = set()  # passes of this row of which it is told if a backward reaches their forward
        self._reached: set[int] = set()  # those that one has reached
        self._apart: set[int] = set()  # those whose numbers stand apart
        self._first = 0  # the first pass of this row
        # called if the gradients of the row so far were thrown away
        self.on_thrown: list[Callable[[], None]] = []
        # called with which of the row's forwards so far stay in it, if some do not
        self.on_choice: list[Callable[[Sequence[bool]], None]] = []
        self._last: Value | Parts = None  # what the last site of the forward that runs has returned
        self._around, self._surrounded = ExitStack(), False  # what probes have around it, from the first row on
        self.start_row()

    def attach(self) -> None:
        if not self.attached:
            super().attach()
            compiled = () if self._surrounded or not self.attached else compiled_modules(self.model)
            for board in self.boards if self.attached else ():
                board.probe.awake = True
                if not self._surrounded:
                    sites = [site for site in board.sites if site.module not in compiled]
                    self._around.enter_context(board.probe.around(sites))
            self._surrounded |= self.attached

    def detach(self) -> None:
        for board in self.boards:
            board.probe.awake = False
        super().detach()

    def close(self) -> None:
        self._forget_leaves()
        staying = next((hook for hook in self._hooks if hook.compiled), None)
        if staying is None:
            self._around.close()
        else:
            staying.kept = self._around.pop_all()  # code that was compiled with it would be compiled anew
        super().close()

    def end(self, more: bool = False) -> None:
        for one in self._sums:
            gradient, one.sum = one.sum, None
            if gradient is not None:
                self._keep_gradient(one.wanted, gradient, one.weight)
        self._sums.clear()
        for compiled in self._compiled.values():
            self._keep_compiled(compiled)
        if self.residuals is not None:
            self.residuals.end(whole=not self._inside)
        last, number = not more, self._number
        for before in sorted(self._apart - {number}):
            if self._belongs(before, last):
                self._join(before)
        if self._inside:
            self._leave_out({number})  # its forward raised
        super().end(more)
        if self._belongs(number, last):
            self._join(number, count=more and self._recorded)
        self._recorded = False
        if last and (without := {one for one in self._listening if not self._belongs(one, last)}):
            self.skipped += sum(one in without for one in self._ended)
            self._leave_out(without)

    def _belongs(self, number: int, last: bool) -> bool:
        """Return True if a pass is known to be of the row: a backward has reached it, or nothing tells, or the row has
        ended (``last``) and no backward has reached any pass."""
        return number in self._reached or number not in self._listening or (last and not self._reached)

    def _join(self, number: int, count: bool = True) -> None:
        """Add the numbers of a pass that stand apart, if any do, to the row. ``count``: more passes follow."""
        if number in self._apart:
            self._apart.remove(number)
            for board in self.boards:
                if board.probe.on == "forward":
                    board.join(number)
        if count and self._clean is not None:
            self._clean.count()

    def _leave_out(self, numbers: set[int]) -> None:
        """Leave passes out of the row that are not in its sums."""
        for number in numbers & self._apart:
            for board in self.boards:
                if board.probe.on == "forward":
                    board.leave_out_apart(number)
        self._apart -= numbers
        self._listening -= numbers
        self._keep_forwards([number not in numbers for number in self._ended])

    def _keep_forwards(self, stay: Sequence[bool]) -> None:
        """Keep those of the forwards that have ended in this row that stay: True."""
        self._ended = [number for number, stays in zip(self._ended, stay, strict=True) if stays]
        for call in self.on_choice if not all(stay) else ():
            call(stay)

    @property
    def forwards(self) -> int:
        """The number of forwards of the model that ended in this row and belong to it."""
        return len(self._ended)

    def note_reached(self, number: int) -> None:
        """Note that a backward, of an update or with a graph, reaches the forward of a pass."""
        if number >= self._first and not self.paused:
            self._reached.add(number)

    def start_row(self) -> None:
        self._calls.clear()
        self._forget_leaves()
        self.outside = False
        self._compiled.clear()
        self._scale: torch.Tensor | None = None
        self.twice, self.transformed = False, False
        self._views.clear()
        self._begin()
        self._row += 1
        if self.backwards is not None:
            self.backwards.start_row()

    def _begin(self) -> None:
        """Note that the row has no pass yet."""
        for numbers in (self._listening, self._reached, self._apart):
            numbers.clear()
        self._ended.clear()
        self._first = self._number
        self._rooted: set[Hook] = set()  # of modules that were called by the model itself

    def trains(self) -> bool:
        """Return True if a forward that begins or ends now is one of training."""
        return torch.is_grad_enabled() and self.model.training and not in_backward() and not self.paused

    def records(self, hook: Hook, compiled: bool) -> bool:
        if self.paused:
            return False
        # compiled code asked as it was made; a module that is compiled is called as it is in the held-out pass
        if not compiled and not (torch.is_grad_enabled() and self.model.training):
            return False
        self.compiled |= compiled
        if not self.ranks.running:
            return False
        if in_backward():
            return hook not in self._calls
        if self._depth:
            self._rooted.add(hook)
        elif hook in self._rooted and not compiled:  # it may be another model's that shares the module
            self.outside = True
            return False
        anew = not compiled and not self._inside and self.repeats(hook)
        if anew and self.backwards is not None and self.backwards.thrown_away():
            self._discard()
        return super().records(hook, compiled)

    def visit(self, hook: Hook, entering: Value | Parts, leaving: Value | Parts, compiled: bool = False) -> None:
        super().visit(hook, entering, leaving, compiled)
        looks = self.residuals is not None and self.residuals.looks and not compiled and not hook.streams
        if looks and self.attached and self.trains():
            assert self.residuals is not None
            self.residuals.visit(hook.module, entering, leaving)
        if self.backwards is not None and self.backwards.looks and not compiled and self.attached and self.trains():
            if self._inside:
                self._last = leaving
            else:
                self._listen_inside(leaving)

    def _listen_inside(self, value: Value | Parts) -> None:
        """Learn of backwards where nothing tells that the model returned."""
        assert self.backwards is not None
        if self.backwards.listen(value.tensors if isinstance(value, Parts) else value, self._number, inside=True):
            self._note_listening()

    def _note_listening(self) -> None:
        if self.backwards is not None and self.backwards.looks:
            self._listening.add(self._number)

    def pass_over(self) -> None:
        self.transformed |= self.attached and self.trains()

    def keep(self, wanted: Wanted, x: Any, y: torch.Tensor, weight: torch.Tensor, compiled: bool = False) -> None:
        self._recorded = True
        board, row, _ = wanted
        if board.probe.on == "forward":
            gradients = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # torch.no_grad() costs six times as much
            try:
                super().keep(wanted, x, y, weight, compiled)
            finally:
                torch._C._set_grad_enabled(gradients)
        elif compiled:
            if (one := self._compiled.get((board, row))) is None:
                one = self._compiled[board, row] = CompiledGradients(wanted)
            if one.came:  # the calls before have had their backward
                self._keep_compiled(one)
                one.weights, one.came = [], 0
            one.weights.append(weight)
        elif y.requires_grad:
            # not register_full_backward_hook, which changes the gradients themselves
            one = ComingGradient(self, wanted, weight, self._number)
            self._await(y, one)
            if self._views:
                self._look_at(self._views.pop())  # now, since it may be gone when its gradient comes
            if y._is_view():
                self._views.append((ref(y), y._version, one))

    def note_written(self) -> None:
        views, self._views = self._views, []
        for view in views:
            self._look_at(view)

    def _look_at(self, view: tuple[ref[torch.Tensor], int, ComingGradient]) -> None:
        """Leave out the gradient of a view into which something has written since its hook came."""
        (value, version, one), wanted = view, view[2].wanted
        if (tensor := value()) is None:
            return
        if tensor._version == version:
            self._views.append(view)
        else:
            one.partial = True
            wanted.board.probe.missed[wanted.board.sites[wanted.row].name] = PARTIAL

    def keep_parts(self, wanted: Wanted, y: Parts, weight: torch.Tensor) -> None:
        self._recorded = True
        own = [part for part in y.distinct if part.requires_grad]
        one = ComingGradient(self, wanted, weight, self._number, len(own))
        for part in own:
            self._await(part, one)

    def _await(self, tensor: torch.Tensor, one: ComingGradient) -> None:
        """Call ``one`` with the gradient of a tensor. A leaf, such as a parameter that enters the first layer, keeps
        its hooks and gets one gradient for all forwards: it has one hook for each place, until the row ends."""
        handle = tensor.register_hook(one)
        if tensor.is_leaf:
            key = one.wanted.board, one.wanted.row, id(tensor)
            if (before := self._on_leaves.get(key)) is not None:
                before.remove()
            self._on_leaves[key] = handle

    def _forget_leaves(self) -> None:
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()

    def receive(self, one: ComingGradient, gradient: torch.Tensor) -> None:
        """Take a gradient that has come; ignore it if its backward does not lead to the update."""
        if self.paused or (self.backwards is not None and not self.backwards.leads()):
            return
        if self.backwards is not None and self.backwards.leaves:
            self.note_reached(one.number)
        if self._views:
            self.note_written()
            self._views.clear()
        if one.partial:
            return
        if one.row != self._row:
            one.came, one.row, one.sum = 0, self._row, None
        one.came += 1
        again = one.came > one.parts
        if one.sum is not None and (self.adding or not again):
            one.sum = one.sum + gradient.detach()
        elif again:
            self.twice = True
        elif self.adding or one.parts > 1:
            one.sum = gradient.detach()
            self._sums.append(one)
        else:
            self._keep_gradient(one.wanted, gradient, one.weight)

    def visit_gradient(self, hook: Hook, gradient: torch.Tensor, of_input: bool) -> None:
        if self.paused or (self.backwards is not None and not self.backwards.leads()):
            return
        for wanted in hook.wanted:
            board, row, _ = wanted
            of_site = board.probe.on == "backward" and (board.sites[row].take == "input") is of_input
            if of_site and (one := self._compiled.get((board, row))) is not None:
                call = one.of_call()
                if self.adding:
                    before = one.sums.get(call)
                    one.sums[call] = gradient.clone() if before is None else before + gradient
                elif one.came > len(one.weights):
                    self.twice = True
                else:
                    self._keep_gradient(wanted, gradient, one.weights[call], compiled=True)

    def _keep_compiled(self, one: CompiledGradients) -> None:
        """Measure what was added up of calls that have had their backward."""
        for call, gradient in one.take().items():
            self._keep_gradient(one.wanted, gradient, one.weights[call])

    def _keep_gradient(
        self, wanted: Wanted, gradient: torch.Tensor, weight: torch.Tensor, compiled: bool = False
    ) -> None:
        site = wanted.board.sites[wanted.row]
        if self.ranks.shards is not None:
            gradient = self.ranks.shards.whole(site.module, site.stack, gradient, site.take)
        if wanted.board.ended or self.paused:
            return
        began = time.perf_counter()
        with torch.no_grad():  # under create_graph gradients are on
            try:
                gradient = site.arranged(gradient)
                if self._scaler is not None:
                    gradient = gradient.to(wide(gradient)) / self._loss_scale(self._scaler, gradient.device)
                if (share := self.ranks.loss_share) != 1:
                    gradient = gradient.to(wide(gradient)) * share
                super().keep(wanted, None, gradient, weight, compiled)
            except Exception as error:
                self.guard(wanted.board, error)
        self.seconds += time.perf_counter() - began

    def _enter(self, *given: Any) -> None:
        self._last = None
        if self.trains():
            if self.backwards is not None and self.backwards.thrown_away():
                self._discard()
            super()._enter(*given)

    def _discard(self) -> None:
        """Begin the row anew: the gradients of the passes so far are gone, and no update follows them."""
        self.discarded += 1
        self.forget_gradients()
        for board in self.boards:
            board.clear()
        if self._clean is not None:
            self._clean.begin()
        self._recorded, self.twice = False, False
        self._keep_forwards([False] * len(self._ended))
        self._begin()
        for call in self.on_thrown:
            call()

    def reach(self, inside: bool) -> None:
        """Note that a backward is about to leave gradients. Those of the row so far may be gone: then forget the passes
        that they came from. Passes that no backward has reached are kept: it may be theirs."""
        if self.paused or self.backwards is None or not self.backwards.thrown_before(inside):
            return
        self.discarded += 1
        self.forget_gradients()
        for board in self.boards:
            if board.probe.on == "forward":
                board.forget_joined()
        if self._clean is not None:
            self._clean.begin()
        self._leave_out(self._reached - {self._number})
        self._reached.clear()
        for call in self.on_thrown:
            call()

    def _reduce(self) -> None:
        """Add up what waits: with the row, or apart from it if no backward has reached the forward of this pass."""
        number = self._number
        is_open = self._inside and self.backwards is not None and self.backwards.looks  # it may yet be left out
        if number in self._reached or not (is_open or number in self._listening):
            super()._reduce()
            return
        self._apart.add(number)
        for board in self.boards:
            try:
                if board.probe.on == "forward":
                    board.reduce_apart(self.masks, number)
                else:
                    board.reduce(self.masks)
            except Exception as error:
                self.guard(board, error)
        self._held = 0

    def forget_gradients(self) -> None:
        """Drop the gradients of the row so far: they led to something else than the update."""
        self._row += 1  # each value's gradient comes for the first time again
        self._sums.clear()
        for compiled in self._compiled.values():
            compiled.forget()
        self.twice = False
        for board in self.boards:
            if board.probe.on == "backward":
                board.clear()

    def _leave(self, *given: Any) -> None:
        if not self.trains():
            return  # a call without gradients did not count as it began: a forward that raised before it is still open
        super()._leave(*given)
        last, self._last = self._last, None
        if not self._depth:  # not within a call of the model by itself
            self._ended.append(self._number)
        if self.backwards is None:
            return
        if self.backwards.listen(given[-1], self._number):
            self._note_listening()
        elif last is not None:
            self._listen_inside(last)

    def _loss_scale(self, scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
        if self._scale is None:
            self._scale = scaler.scale(torch.ones((), device=device))  # get_scale() would read the device
        return self._scale
