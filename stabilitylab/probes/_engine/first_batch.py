"""The first training batch, kept for the reference pass of those who give none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..curvature.landscape import PARTS
from .batch_copy import NotCopied, each_tensor, tensors
from .guard import said
from .hooks import RootHook
from .masks import Mask, Masks

REFUSED = (
    "the first batch holds {name}, of which no copy can be kept (reference=, a function that runs the model on a fixed "
    "batch, does without)"
)


class FirstBatch:
    """A reference that runs the model on copies of the arguments of its first training forward that ended, with that
    mask: one that raised may have been too large.

    Each run has a copy of its own, so that a model that writes into what it is given gets the same each time.
    ``refused`` says why there is no reference, "" unless the arguments hold something that cannot be copied.
    """

    def __init__(self, model: nn.Module, masks: Masks, paused: Callable[[], bool]) -> None:
        self._model, self._masks, self._paused = model, masks, paused
        self._given: tuple[Any, Any] | None = None  # args, kwargs
        self._mask: Mask | None = None
        self.refused = ""
        self._handles: list[Any] = [
            model.register_forward_pre_hook(RootHook(self._keep), with_kwargs=True),
            model.register_forward_hook(RootHook(self._ended)),
        ]

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
        """Return the model's output for each third of the batch, if all its tensors have the same first dimension, of 3
        at least; else for the whole batch."""
        found = tensors(self._given)  # an object may have more to it than its tensors' sizes
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in found or ()}
        if len(sizes) != 1 or (size := sizes.pop()) < PARTS:
            return [self._run(self._given)]
        cuts = [size * part // PARTS for part in range(PARTS + 1)]
        args, kwargs = self._given or ((), {})
        parts = (each_tensor(lambda tensor, a=a, b=b: tensor[a:b], args=args, kwargs=kwargs) for a, b in pairwise(cuts))
        return [self._run((args, kwargs)) for args, kwargs in parts]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> Any:
        return self._given and {"given": self._given, "mask": self._mask}

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        if state is not None:
            args, kwargs = state["given"]
            args, kwargs, self._mask = each_tensor(
                lambda tensor: tensor.to(device), args=args, kwargs=kwargs, mask=state["mask"]
            )
            self._given = args, kwargs
            self.close()

    def _run(self, given: tuple[Any, Any] | None) -> Any:
        assert given is not None
        args, kwargs = each_tensor(torch.Tensor.clone, args=given[0], kwargs=given[1])
        return self._model(*args, **kwargs)

    def _keep(self, args: Any, kwargs: Any) -> None:
        if self._counts():
            self._given, self.refused = None, ""
            given = {"args": args, "kwargs": kwargs, "mask": self._masks.given()}
            try:
                args, kwargs, self._mask = each_tensor(lambda tensor: tensor.detach().clone(), **given)
                self._given = args, kwargs
            except NotCopied as error:
                self.refused = REFUSED.format(name=error)
            except Exception as error:  # of the caller's classes: training goes on
                self.refused = f"the first batch cannot be copied: {said(error)}"

    def _ended(self, *_: object) -> None:
        if self._counts() and (self._given is not None or self.refused):
            self.close()

    def _counts(self) -> bool:
        return torch.is_grad_enabled() and self._model.training and not self._paused()
