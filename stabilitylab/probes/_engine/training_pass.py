"""The training pass, recorded on the caller's own forwards and backwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..base import wide
from ..parameters.ranks import Ranks
from .board import Board, CleanPasses
from .guard import Guard
from .hooks import Hook, in_backward
from .masks import Masks
from .passes import Pass, Wanted
from .watchable import compiled_modules


class TrainingPass(Pass):
    """Records forwards of the model in training mode with gradients on, and the gradients of their activations.

    A forward that runs inside a backward is a recomputation (activation checkpointing): it counts only for sites that
    had no ordinary forward since ``start_row`` - those that reentrant checkpointing first runs without gradients.
    """

    on_output: Callable[[Any], None] | None = None  # is given what the model returned

    def __init__(
        self,
        model: nn.Module,
        boards: Sequence[Board],
        masks: Masks,
        guard: Guard,
        scaler: torch.amp.GradScaler | None = None,
        ranks: Ranks | None = None,
        clean: CleanPasses | None = None,
        together: bool = False,
    ) -> None:
        super().__init__(model, boards, masks, guard, together, ranks)
        self._clean, self._recorded = clean, False
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._weights: dict[tuple[Board, int], torch.Tensor] = {}  # in compiled code, until its gradients come
        self.compiled = False  # a call came from compiled code
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
        staying = next((hook for hook in self._hooks if hook.compiled), None)
        if staying is None:
            self._around.close()
        else:
            staying.kept = self._around.pop_all()  # code that was compiled with it would be compiled anew
        super().close()

    def end(self, more: bool = False) -> None:
        super().end(more)
        if more and self._recorded and self._clean is not None:
            self._clean.count()
        self._recorded = False

    def start_row(self) -> None:
        self._calls.clear()
        self._weights.clear()
        self._scale: torch.Tensor | None = None

    def records(self, hook: Hook, compiled: bool) -> bool:
        # compiled code asked as it was made; a module that is compiled is called as it is in the held-out pass
        if not compiled and not (torch.is_grad_enabled() and self.model.training):
            return False
        self.compiled |= compiled
        if self.ranks is not None and not self.ranks.running:
            return False
        return hook not in self._calls if in_backward() else super().records(hook, compiled)

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
            self._weights[board, row] = weight
        elif y.requires_grad:
            # not register_full_backward_hook, which changes the gradients themselves
            y.register_hook(lambda gradient: self._keep_gradient(wanted, gradient, weight))

    def visit_gradient(self, hook: Hook, gradient: torch.Tensor, of_input: bool) -> None:
        for wanted in hook.wanted:
            board, row, _ = wanted
            of_site = board.probe.on == "backward" and (board.sites[row].take == "input") is of_input
            if of_site and (weight := self._weights.get((board, row))) is not None:
                self._keep_gradient(wanted, gradient, weight, compiled=True)

    def _keep_gradient(
        self, wanted: Wanted, gradient: torch.Tensor, weight: torch.Tensor, compiled: bool = False
    ) -> None:
        site = wanted.board.sites[wanted.row]
        if self.ranks is not None and self.ranks.shards is not None:
            gradient = self.ranks.shards.whole(site.module, site.stack, gradient)
        if wanted.board.ended:
            return
        began = time.perf_counter()
        with torch.no_grad():  # under create_graph gradients are on
            try:
                gradient = site.arranged(gradient)
                if self._scaler is not None:
                    gradient = gradient.to(wide(gradient)) / self._loss_scale(self._scaler, gradient.device)
                if self.ranks is not None and (share := self.ranks.loss_share) != 1:
                    gradient = gradient.to(wide(gradient)) * share
                super().keep(wanted, None, gradient, weight, compiled)
            except Exception as error:
                self.guard(wanted.board, error)
        self.seconds += time.perf_counter() - began

    def _enter(self, *given: Any) -> None:
        if torch.is_grad_enabled() and self.model.training and not in_backward():
            super()._enter(*given)

    def _leave(self, *given: Any) -> None:
        super()._leave(*given)
        if self.on_output is not None and torch.is_grad_enabled() and self.model.training and not in_backward():
            self.on_output(given[-1])

    def _loss_scale(self, scaler: torch.amp.GradScaler, device: torch.device) -> torch.Tensor:
        if self._scale is None:
            self._scale = scaler.scale(torch.ones((), device=device))  # get_scale() would read the device
        return self._scale
