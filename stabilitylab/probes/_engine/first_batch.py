"""The first training batch, kept for the reference pass of those who give none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..curvature.landscape import PARTS
from .hooks import RootHook
from .masks import Mask, Masks


class FirstBatch:
    """A reference that runs the model on copies of the arguments of its first training forward, with that mask."""

    def __init__(self, model: nn.Module, masks: Masks) -> None:
        self._model, self._masks = model, masks
        self._given: tuple[Any, Any] | None = None
        self._mask: Mask | None = None
        hook = RootHook(self._keep)
        self._handle: Any = model.register_forward_pre_hook(hook, with_kwargs=True)

    @property
    def ready(self) -> bool:
        return self._given is not None

    def mask(self) -> Mask | None:
        """That of the first pass: for :class:`.masks.Masks`."""
        return self._mask

    def __call__(self) -> None:
        """Runs the model; nothing that it returns is a metric."""
        self._run(self._given)

    def parts(self) -> list[Any]:
        """What the model returns for each third of the batch, where every tensor that it was given has the same first
        dimension, of 3 at least; else for the batch, alone."""
        tensors = [leaf for leaf in tree_leaves(self._given) if isinstance(leaf, torch.Tensor)]
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
        if len(sizes) != 1 or (size := sizes.pop()) < PARTS:
            return [self._run(self._given)]
        cuts = [size * part // PARTS for part in range(PARTS + 1)]
        parts = (_each_tensor(lambda tensor, a=a, b=b: tensor[a:b])(self._given) for a, b in pairwise(cuts))
        return [self._run(part) for part in parts]

    def close(self) -> None:
        self._handle.remove()

    def state_dict(self) -> Any:
        return self._given and {"given": self._given, "mask": self._mask}

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        if state is not None:
            move = _each_tensor(lambda tensor: tensor.to(device))
            self._given, self._mask = move(state["given"]), move(state["mask"])
            self.close()

    def _run(self, given: Any) -> Any:
        assert given is not None
        args, kwargs = given
        return self._model(*args, **kwargs)

    def _keep(self, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and self._model.training:
            copied = _each_tensor(lambda tensor: tensor.detach().clone())
            self._given, self._mask = copied((args, kwargs)), copied(self._masks.given())
            self.close()


def _each_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda tree: tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
