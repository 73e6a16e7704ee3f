"""The batch that an update is made of, kept for the curvature of its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .batch_copy import NotCopied, each_tensor
from .guard import said
from .hooks import RootHook, in_backward

REFUSED = (
    "the batch of the update holds {name}, of which no copy can be kept (curvature_loss=, a function that returns the "
    "loss of the batch that was trained on, does without)"
)


class UpdateBatch:
    """Runs the model on copies of the arguments of a row's training forwards: one micro-batch, or several.

    Copies are made in rows whose curvature is looked at, and are gone once that is done. Each run has a copy of its
    own, so that a model that writes into what it is given gets the same each time. ``refused`` says why there is no
    batch, "" unless the arguments hold something that cannot be copied.
    """

    def __init__(self, model: nn.Module, paused: Callable[[], bool]) -> None:
        self._model, self._paused, self._wanted, self.refused = model, paused, False, ""
        self._begun: Any = None  # of the forward that runs, which may raise
        self._coming: list[Any] = []  # of the row that runs
        self._given: list[Any] = []  # of the row whose update is made
        self._handles: list[Any] = [
            model.register_forward_pre_hook(RootHook(self._keep), with_kwargs=True),
            model.register_forward_hook(RootHook(self._ended)),
        ]

    @property
    def ready(self) -> bool:
        return bool(self._coming)

    def begin(self, wanted: bool) -> None:
        """Begin a row; ``wanted``: its batch is to be kept."""
        self._wanted, self._begun, self._coming = wanted, None, []

    def discard(self) -> None:
        """Forget the forwards that have ended: no update follows them."""
        self._coming = []

    def hand_over(self) -> None:
        """Close the batch before the optimizer's step; the next row's forwards are of another batch."""
        self._given, self._coming, self._wanted = self._coming, [], False

    def release(self) -> None:
        self._given = []

    def parts(self) -> list[Any]:
        """Return the model's output for each micro-batch."""
        copies = (each_tensor(torch.Tensor.clone, args=args, kwargs=kwargs) for args, kwargs in self._given)
        return [self._model(*args, **kwargs) for args, kwargs in copies]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, args: Any, kwargs: Any) -> None:
        wanted = self._wanted and not self._paused()
        if wanted and torch.is_grad_enabled() and self._model.training and not in_backward():
            try:
                self._begun = each_tensor(lambda tensor: tensor.detach().clone(), args=args, kwargs=kwargs)
            except NotCopied as error:
                self._refuse(REFUSED.format(name=error))
            except Exception as error:  # of the caller's classes: training goes on
                self._refuse(f"the batch of the update cannot be copied: {said(error)}")

    def _ended(self, *_: object) -> None:
        if self._begun is not None:
            self._coming.append(self._begun)
            self._begun = None

    def _refuse(self, why: str) -> None:
        self.refused, self._wanted, self._coming = why, False, []
