"""The common part of all passes that hooks record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import nn

from ..parameters.processes import Processes
from ..parameters.shards import ActivationShards
from ..places.sites import Parts, Site
from .board import Board
from .guard import Guard
from .hooks import Hook, RootHook, Value, is_nested, keep_apart
from .masks import Masks
from .watchable import split_by_ddp

EARLY = "is reached before a norm tells how the tokens lie on the ranks"
HELD = 1 << 24  # numbers that may wait on the device before they are added up
INNER = "shows the product before its last weight to no module, and to no product of matrices that is known"
NOTHING = "passes no floating-point tensor there"
WRITTEN = "writes into its input, whose value is gone when it returns"
SMALL = 1 << 17  # entries of a value that costs a GPU less to read than its kernel costs to launch


class Wanted(NamedTuple):
    """The share of a probe in a module's calls: its board and row, and the raw numbers that this feeds."""

    board: Board
    row: int
    fed: tuple[str, ...]


class Shows(Protocol):
    """Values that the model shows by stabilitylab.tap, see :class:`~.tap_places.Tapped`."""

    expected: bool  # the model's code has taps, and their values are still to come

    def listen(self, listener: Pass) -> None: ...

    def turn_away(self, listener: Pass) -> None: ...

    def by_head(self, board: Board, row: int, numbers: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]: ...


class Pass:
    """The hooks on the sites of boards. A pass lasts from one call of the model to the next; each asks for masks anew.

    Where parts of the model are called instead of the model, or it is compiled, a pass ends when a site comes round
    again. ``guard``: what is around each piece of a probe's work.
    """

    tapped: Shows | None = None

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        guard: Guard,
        ranks: Processes,
        together: bool = False,
    ) -> None:
        self.model, self.boards, self.masks, self.guard, self.ranks = model, boards, masks, guard, ranks
        self.left_out = split_by_ddp(model)
        self._together = together
        self.seconds = 0.0
        self._roots: list[Any] = []
        self._hooks: list[Hook] = []
        self._inside = False
        self._depth = 0  # calls of the model that run, each within the one before
        self._number = 0  # of the pass
        self._calls: dict[Hook, int] = {}  # the pass of each hook's last call
        self.order: dict[tuple[str, int], int] = {}  # (table, row) -> when it is called in the forward pass
        self._held = 0
        self._wrote = False  # the module that returns now has written into what entered it
        self.returned: dict[str, ref[torch.Tensor]] = {}
        self.entered: dict[str, torch.Size] = {}  # stack -> sizes of what entered its last layer
        for board in boards:
            board.probe.entered = self.entered
        self.broken = 0  # forwards that raised, whose numbers were left out

    @property
    def attached(self) -> bool:
        return bool(self._roots)

    @property
    def called(self) -> bool:
        """True if any call counted since the row began."""
        return bool(self._calls)

    def attach(self) -> None:
        """Put a hook on every module where a board wants something: one per module, since calling a hook costs as much
        as a norm."""
        if self.attached or not (self.boards or (self.tapped is not None and self.tapped.expected)):
            return
        keep_apart()
        self._roots = [
            self.model.register_forward_pre_hook(RootHook(self._enter)),
            self.model.register_forward_hook(RootHook(self._leave)),
        ]
        self._hooks = self._hooks or list(self._made())
        for hook in self._hooks:
            hook.attach()
        if self.tapped is not None:
            self.tapped.listen(self)

    def detach(self) -> None:
        """Take away the hooks, except those in compiled code, which would be missing when it is compiled again."""
        for handle in self._roots:
            handle.remove()
        self._roots = []
        if self.tapped is not None:
            self.tapped.turn_away(self)
        for hook in self._hooks:
            if not hook.compiled:
                hook.detach()

    def add(self, board: Board) -> None:
        """Add a board whose places the model shows by ``tap`` alone."""
        self.boards = [*self.boards, board]
        board.probe.entered = self.entered

    def stay(self) -> None:
        """Let all hooks stay from now on, since the model is compiled."""
        self._hooks = self._hooks or list(self._made())
        for hook in self._hooks:
            hook.compiled = True

    def close(self) -> None:
        """Take away all hooks, or make them do nothing."""
        self.detach()
        for hook in self._hooks:
            hook.let_go()
        self._hooks = []

    def end(self, more: bool = False) -> None:
        """Add up what the pass left waiting. ``more``: True if another micro-batch of the same row follows.

        What waits of a forward that never came to its end is dropped: it raised, and its loss does not exist.
        """
        if self._inside:
            self._inside = False
            self.broken += 1
            self._drop()
        else:
            self._reduce()
        self.masks.renew()
        self._number += 1

    def records(self, hook: Hook, compiled: bool) -> bool:
        """Return True if this call of a module counts. ``compiled``: it is one of compiled code, not of the module."""
        if not self._inside and self._calls.get(hook) == self._number:
            self.end(more=True)
        self._calls[hook] = self._number
        return True

    def repeats(self, hook: Hook) -> bool:
        """Return True if the module of this hook was called in this pass already."""
        return self._calls.get(hook) == self._number

    def visit(self, hook: Hook, entering: Value | Parts, leaving: Value | Parts, compiled: bool = False) -> None:
        """Measure what is wanted of a call of a module: what enters it and what it returns."""
        if not self.attached or not self.records(hook, compiled):
            return
        began = time.perf_counter()
        held: Any = (entering, leaving)
        self._wrote = not compiled and hook.wrote_into(entering)
        if self._wrote:
            self.note_written()
        shards = self.ranks.shards
        if shards is not None and not isinstance(leaving, Parts):
            entering, leaving = self._whole(shards, hook, entering, leaving)
        for wanted in hook.wanted:
            board, row, _ = wanted
            site = board.sites[row]
            self.order.setdefault((board.table.name, row), len(self.order))
            y = site.value(entering, leaving)
            if y is None:
                board.probe.missed.setdefault(site.name, INNER if site.take == "inner" else NOTHING)
            if y is None or board.ended:
                continue
            if shards is not None and shards.unsure(held[site.take != "input"]):
                board.probe.missed[site.name] = EARLY
                self._hold(wanted, board.probe.unmeasured(y.device))
                continue
            if self._wrote and site.take == "input":
                board.probe.missed[site.name] = WRITTEN
                continue
            x = entering if site.whole and not self._wrote else None
            try:
                if isinstance(y, Parts):
                    self._visit_parts(wanted, x, y, compiled)
                    continue
                shape = site.arranged(y).shape
                if board.probe.on != "backward":  # an arranged value is not the one that gets the gradient
                    x, y = site.arranged(x), site.arranged(y)
                elif shards is not None:  # the part that has the gradient
                    y = held[site.take != "input"]
                    shape = shards.shape(site.module, site.stack, y, site.take)
                self.keep(wanted, x, y, self._weight(site, shape, y.device), compiled)
            except Exception as error:
                self.guard(board, error)
        self.seconds += time.perf_counter() - began

    def _visit_parts(self, wanted: Wanted, x: Any, y: Parts, compiled: bool) -> None:
        """Measure a stream that is read in parts: their mean, or the gradients of all of them."""
        board, row, _ = wanted
        weight = self._weight(board.sites[row], y.tensors[0].shape, y.tensors[0].device)
        if board.probe.on == "backward":
            self.keep_parts(wanted, y, weight)
        else:
            self.keep(wanted, x.mean if isinstance(x, Parts) else x, y.mean, weight, compiled)

    def _weight(self, site: Site, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return the weight of each token of a value of this shape, (..., width)."""
        if site.inner:
            return self.masks.nearest(site.mask, shape[:-1], device)
        return self.masks(site.mask, shape[:-1], device, site.layer > 0 and not site.sublayer and site.whole)

    def keep_parts(self, wanted: Wanted, y: Parts, weight: torch.Tensor) -> None:
        """Note that gradients of parts will come, see :class:`~.training_pass.TrainingPass`."""

    def _whole(self, shards: ActivationShards, hook: Hook, *values: Any) -> Iterator[Any]:
        """Yield values of a tensor-parallel model: with other ranks' parts, unless a gradient alone is wanted."""
        sites = [board.sites[row] for board, row, _ in hook.wanted if board.probe.on != "backward"]
        for take, value in zip(("input", "output"), values, strict=True):
            needed = any(site.take == take or (take == "input" and site.whole) for site in sites)
            yield shards.whole(hook.module, sites[0].stack, value, take) if needed else value

    def give_up(self, hook: Hook, error: Exception) -> None:
        """End the tables that want a value of a module, since the value cannot be read."""
        if self.attached and self.records(hook, compiled=False):
            for board in dict.fromkeys(board for board, _, _ in hook.wanted):
                if not board.ended:
                    self.guard(board, error)

    def note_written(self) -> None:
        """Note that a module has written into what entered it, see :class:`~.training_pass.TrainingPass`."""

    def pass_over(self) -> None:
        """Note that a call of a module is not measured, since it is inside a transform of torch.func."""

    def visit_gradient(self, hook: Hook, gradient: torch.Tensor, of_input: bool) -> None:
        """Note a gradient in compiled code, see :class:`~.training_pass.TrainingPass`."""

    def keep(self, wanted: Wanted, x: Any, y: torch.Tensor, weight: torch.Tensor, compiled: bool = False) -> None:
        """Measure at a site, and keep the numbers, still per token, until the pass ends."""
        board, row, fed = wanted
        if self._together and board.probe.together and y.numel() <= SMALL:
            y = y.clone() if compiled else y  # compiled code uses its memory again
            for raw in fed:
                board.hold_value(raw, row, y)
            self._held += y.numel()
            return
        own = weight if board.probe.on == "backward" else None  # of its forward, behind which others may have come
        self._hold(wanted, board.probe.measure(board.sites[row], x, y, weight), compiled, own)

    def _hold(self, wanted: Wanted, numbers: Any, compiled: bool = False, weight: torch.Tensor | None = None) -> None:
        """Keep the numbers of a call, if there are any. ``weight``: that of each token, if it is not that of the pass
        which ends."""
        board, row, fed = wanted
        if numbers is None:
            if self._wrote:  # and the probe needs what entered
                board.probe.missed[board.sites[row].name] = WRITTEN
            return
        for raw in numbers if isinstance(numbers, dict) else fed:
            number = numbers[raw] if isinstance(numbers, dict) else numbers
            number = number.clone() if compiled else number
            if board.probe.heads and self.tapped is not None:
                for each, own in self.tapped.by_head(board, row, number):
                    self.order.setdefault((board.table.name, each), len(self.order))
                    board.hold(raw, each, own)
            else:
                board.hold(raw, row, number, weight)
            self._held += number.numel()
        if self._held > HELD:
            self._reduce()

    def _reduce(self) -> None:
        """Add up what waits on the boards."""
        for board in self.boards:
            try:
                board.reduce(self.masks)
            except Exception as error:
                self.guard(board, error)
        self._held = 0

    def _drop(self) -> None:
        """Forget what waits on the boards."""
        for board in self.boards:
            board.drop()
        self._held = 0

    def _made(self) -> Iterator[Hook]:
        wanted: dict[tuple[nn.Module, tuple[str, ...]], list[Wanted]] = {}
        for board in self.boards:
            read = {board.reads(column) for column in board.rules}
            for row, site in enumerate(board.sites):
                taps = {tap: site.taps[tap] for tap in board.probe.taps if tap in site.taps and tap in read}
                raws = {board.main: site.module} | taps
                for module in dict.fromkeys(raws.values()):
                    fed = tuple(raw for raw, feeder in raws.items() if feeder is module)
                    # the gradient of a stream that is left in parts is that of each part
                    streams = site.streams if board.probe.on != "backward" and module is site.module else ()
                    wanted.setdefault((module, streams), []).append(Wanted(board, row, fed))
        for (module, streams), all_of_it in wanted.items():
            places = [(board.probe.on, board.sites[row].take) for board, row, _ in all_of_it]
            needs_input = any(on != "backward" or take == "input" for on, take in places)
            needs_output = any(take == "output" for _, take in places)
            gradient_of = frozenset(take for on, take in places if on == "backward")
            sites = [board.sites[row] for board, row, _ in all_of_it]
            is_tap = all(site.is_tap or site.module is not module for site in sites)
            wanted_of = tuple(all_of_it)
            yield Hook(
                self, module, wanted_of, needs_input, needs_output, gradient_of, streams, is_tap, _layer_of(sites)
            )

    def _enter(self, *given: Any) -> None:
        nested = self._inside and is_nested(self.model)
        if nested:
            self._inside = False  # the model calls itself: what the outer call has shown so far stands
        self._depth = self._depth + 1 if nested else 1
        self.end(more=True)
        self._inside = True

    def _leave(self, *given: Any) -> None:
        self._inside = False
        self._depth = max(self._depth - 1, 0)


def _layer_of(sites: Sequence[Site]) -> str:
    """Return the stack of which the module of these sites is a layer that is called as a whole, or the first module;
    "" if it is neither."""
    for site in sites:
        is_layer = site.layer > 0 and not site.sublayer and site.whole
        if is_layer or (site.layer == 0 and site.sublayer == "input" and site.take == "input"):
            return site.stack
    return ""
