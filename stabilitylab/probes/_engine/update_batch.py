"""The batch that an update is made of, kept for the curvature of its own loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .hooks import RootHook


class UpdateBatch:
    """Runs the model on copies of the arguments of a row's training forwards: one micro-batch, or several.

    Copies are made in rows whose curvature is looked at, and are gone once that is done.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._wanted = model, False
        self._coming: list[Any] = []  # of the row that runs
        self._given: list[Any] = []  # of the row whose update is made
        self._handle: Any = model.register_forward_pre_hook(RootHook(self._keep), with_kwargs=True)

    @property
    def ready(self) -> bool:
        return bool(self._coming)

    def begin(self, wanted: bool) -> None:
        """A row begins; ``wanted``: its batch is."""
        self._wanted, self._coming = wanted, []

    def hand_over(self) -> None:
        """The optimizer's step comes; the next row's forwards are another batch's."""
        self._given, self._coming, self._wanted = self._coming, [], False

    def release(self) -> None:
        self._given = []

    def parts(self) -> list[Any]:
        """What the model returns for each micro-batch."""
        return [self._model(*args, **kwargs) for args, kwargs in self._given]

    def close(self) -> None:
        self._handle.remove()

    def _keep(self, args: Any, kwargs: Any) -> None:
        if self._wanted and torch.is_grad_enabled() and self._model.training and not _in_backward():
            self._coming.append(tree_map(_copied, (args, kwargs)))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _in_backward() -> bool:
    """Whether a forward is repeated inside a backward pass (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1
