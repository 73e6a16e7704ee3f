"""The passes that are recorded, by hooks: what any has in common, and the training pass, on the caller's own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..base import wide
from ..places.sites import hidden_state, tensor_of
from .board import Board, CleanPasses, Masks

HELD = 1 << 24  # numbers that may wait on the device before they are added up
SMALL = 1 << 17  # entries of a value that costs a GPU less to read than its kernel costs to launch


class Wanted(NamedTuple):
    """What a probe takes at a module: its board and row, and the raw numbers that this feeds."""

    board: Board
    row: int
    fed: tuple[str, ...]


class Pass:
    """Hooks on the sites of boards. A pass lasts from one call of the model to the next; each asks for masks anew.

    Where parts of the model are called instead of the model, a pass ends when a site comes round again.
    """

    def __init__(self, model: nn.Module, boards: Sequence[Board], masks: Masks, together: bool = False) -> None:
        self.model, self.boards, self.masks, self._together = model, boards, masks, together
        self.seconds = 0.0
        self._handles: list[Any] = []
        self._inside = False
        self._number = 0  # of the pass
        self._calls: dict[int, int] = {}  # site -> the pass of its last call
        self.order: dict[tuple[str, int], int] = {}  # (table, row) -> when it is called in the forward pass
        self._held = 0

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        if not self.boards:
            return
        self._handles.append(self.model.register_forward_pre_hook(self._enter))
        self._handles.append(self.model.register_forward_hook(self._leave))
        wanted: dict[nn.Module, list[Wanted]] = {}
        for board in self.boards:
            read = {board.reads(column) for column in board.rules}
            for row, site in enumerate(board.sites):
                taps = {tap: site.taps[tap] for tap in board.probe.taps if tap in site.taps and tap in read}
                raws = {board.main: site.module} | taps
                for module in dict.fromkeys(raws.values()):
                    fed = tuple(raw for raw, feeder in raws.items() if feeder is module)
                    wanted.setdefault(module, []).append(Wanted(board, row, fed))
        for module, all_of_it in wanted.items():  # one hook a module: what calls a hook costs as much as a norm
            hook = self._hook(tuple(all_of_it), key=len(self._handles))
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end(self, more: bool = False) -> None:
        """Adds up what the pass left waiting; ``more``: another micro-batch of the same row follows."""
        for board in self.boards:
            board.reduce(self.masks)
        self.masks.renew()
        self._number += 1
        self._held = 0

    def records(self, key: int) -> bool:
        """Whether this call of a site counts."""
        if not self._inside and self._calls.get(key) == self._number:
            self.end(more=True)
        self._calls[key] = self._number
        return True

    def keep(self, board: Board, row: int, fed: tuple[str, ...], x: Any, y: torch.Tensor, weight: torch.Tensor) -> None:
        """Measures at a site and keeps the numbers, still per token, until the pass ends."""
        site = board.sites[row]
        if site.channels_first:
            x, y = site.arranged(x), site.arranged(y)
        if self._together and board.probe.together and y.numel() <= SMALL:
            for raw in fed:
                board.hold_value(raw, row, y)
            self._note(y.numel())
            return
        numbers: Any = board.probe.measure(site, x, y, weight)
        if numbers is None:
            return
        for raw in numbers if isinstance(numbers, dict) else fed:
            number = numbers[raw] if isinstance(numbers, dict) else numbers
            board.hold(raw, row, number)
            self._note(number.numel())

    def _note(self, held: int) -> None:
        self._held += held
        if self._held > HELD:
            for each in self.boards:
                each.reduce(self.masks)
            self._held = 0

    def _hook(self, wanted: tuple[Wanted, ...], key: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.records(key):
                return
            began = time.perf_counter()
            x = hidden_state(args, kwargs)
            for each in wanted:
                board, row, fed = each
                site = board.sites[row]
                self.order.setdefault((board.table.name, row), len(self.order))
                y = x if site.take == "input" else tensor_of(output)
                if y is not None:
                    tokens = (site.arranged(y) if site.channels_first else y).shape[:-1]
                    own = x if site.whole else None
                    self.keep(board, row, fed, own, y, self.masks(site.mask, tokens, y.device))
            self.seconds += time.perf_counter() - began

        return hook

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.end(more=True)
        self._inside = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False


class TrainingPass(Pass):
    """Records forwards of the model in training mode with gradients on, and the gradients of their activations.

    A forward that runs inside a backward is a recomputation (activation checkpointing): it counts only for sites that
    had no ordinary forward since ``start_row`` - those that reentrant checkpointing first runs without gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        scaler: torch.amp.GradScaler | None = None,
        share: float = 1.0,
        clean: CleanPasses | None = None,
        together: bool = False,
    ) -> None:
        super().__init__(model, boards, masks, together)
        self._clean, self._recorded = clean, False
        self._share = share  # of this rank's loss in the loss of all ranks
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.start_row()

    def end(self, more: bool = False) -> None:
        super().end(more)
        if more and self._recorded and self._clean is not None:
            self._clean.count()
        self._recorded = False

    def start_row(self) -> None:
        self._calls.clear()
        self._scale: torch.Tensor | None = None

    def records(self, key: int) -> bool:
        if not (torch.is_grad_enabled() and self.model.training):
            return False
        return key not in self._calls if _in_backward() else super().records(key)

    def keep(self, board: Board, row: int, fed: tuple[str, ...], x: Any, y: torch.Tensor, weight: torch.Tensor) -> None:
        self._recorded = True
        if board.probe.on == "forward":
            torch._C._set_grad_enabled(False)  # it is on; torch.no_grad() costs six times as much
            try:
                super().keep(board, row, fed, x, y, weight)
            finally:
                torch._C._set_grad_enabled(True)
        elif y.requires_grad:

            def on_gradient(gradient: torch.Tensor) -> None:
                began = time.perf_counter()
                if torch.is_grad_enabled():  # under create_graph
                    with torch.no_grad():
                        self._keep_gradient(board, row, fed, gradient, weight)
                else:
                    self._keep_gradient(board, row, fed, gradient, weight)
                self.seconds += time.perf_counter() - began

            y.register_hook(on_gradient)  # not register_full_backward_hook, which changes the gradients themselves

    def _keep_gradient(
        self, board: Board, row: int, fed: tuple[str, ...], gradient: torch.Tensor, weight: torch.Tensor
    ) -> None:
        if self._scaler is not None:
            gradient = gradient.to(wide(gradient)) / self._loss_scale(self._scaler, gradient.device)
        if self._share != 1:
            gradient = gradient.to(wide(gradient)) * self._share
        super().keep(board, row, fed, None, gradient, weight)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training and not _in_backward():
            super()._enter(module, args)

    def _loss_scale(self, scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
        if self._scale is None:
            self._scale = scaler.scale(torch.ones((), device=device))  # get_scale() would read the device
        return self._scale


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Those of torch (on the model's devices too), Python and numpy, whichever the caller's code draws from."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; each module's own training flag and the random states are restored. Buffers that a
    forward itself changes in eval mode (a counter, say) are not."""
    training = [module for module in model.modules() if module.training]
    with random_states_kept(model), torch.no_grad():
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
