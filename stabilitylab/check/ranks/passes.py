"""The passes of a check: this rank's loss, with gradients as the loop has them before the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import InputError, UsageError
from ...probes.parameters.layouts import local, local_gradient, whole
from .members import Members
from .restoring import KeptTraining

Loss = Callable[[nn.Module, Any], Tensor]
Action = Callable[[nn.Module], Any]


class RankPasses:
    """Runs the loss on this rank, each time in training mode with the random numbers that the caller's generators give
    next. Every pass is taken by all ranks together, and fails on all of them if it fails on one."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss,
        after_backward: Action | None,
        members: Members,
        kept: KeptTraining,
    ) -> None:
        self.model, self._batch, self._loss_fn, self._after = model, batch, loss_fn, after_backward
        self._members, self._kept = members, kept

    def rehearse(self) -> None:
        """Run the loss once without DistributedDataParallel, which would communicate: a loss that fails on one rank
        then fails on all of them at once. A loss that needs the wrapper is left for the pass itself."""
        if not isinstance(self.model, DistributedDataParallel):
            return
        bare: nn.Module = self.model.module
        problem = ""
        with self._begun(), torch.no_grad():
            try:
                self._loss_fn(bare, self._batch)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        failed = [own for own in self._members.gathered(problem) if own]
        if failed and len(failed) < self._members.size:

            def again() -> None:
                if problem:
                    raise InputError(problem)

            self._members.together("loss_fn(model, batch)", again)

    def loss(self) -> float:
        """Return this rank's loss, without gradients."""

        def run() -> float:
            with self._begun(), torch.no_grad():
                found = _number(self._loss_fn(self.model, self._batch))
            self._members.processes.reshard()
            return found

        return self._members.together("loss_fn(model, batch)", run)

    def gradients(self, listener: AbstractContextManager[Any] | None = None) -> float:
        """Leave this rank's gradients as the optimizer would meet them; return its loss. ``listener``: a context around
        the forward pass."""

        def run() -> float:
            for own in self._members.parameters.values():
                own.grad = None
            with self._begun():
                with listener or nullcontext():
                    loss = self._loss_fn(self.model, self._batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise UsageError("it must return one number with a gradient.")
                loss.backward()
            return _number(loss)

        found = self._members.together("loss_fn(model, batch)", run)
        if self._after is not None:
            self._members.together("after_backward(model)", lambda: self._after and self._after(self.model))
        return found

    def own_gradients(self) -> Mapping[str, Tensor | None]:
        """Return the gradient of the part of each trainable parameter that this rank holds."""
        return {
            name: None if own.grad is None else _dense(local_gradient(own).detach())
            for name, own in self._members.parameters.items()
            if own.requires_grad
        }

    @contextmanager
    def _begun(self) -> Iterator[None]:
        self._kept.seed()
        if not self.model.training:
            self.model.train()
        try:
            yield
        finally:
            self._kept.undo_buffers()


def own_values(members: Members) -> dict[str, Tensor]:
    """Return the part of each parameter that this rank holds: the tensor itself, or a shard's memory."""
    return {name: local(own.detach()) for name, own in members.parameters.items()}


def _number(loss: Any) -> float:
    return float(whole(loss.detach()) if isinstance(loss, Tensor) else loss)


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
