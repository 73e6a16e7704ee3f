"""The first training batch, kept for the reference pass of those who give none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..curvature.landscape import PARTS
from .batch_copy import each_tensor, tensors
from .forward_copies import ForwardCopies
from .masks import Mask, Masks


class FirstBatch(ForwardCopies):
    """A reference: the first training forward that ended, with its mask.

    ``masks``: those of the training pass, which asks the caller once per forward. ``renewed``: returns True if the
    current forward has renewed the masks, as a probed forward does.
    """

    what = "the first batch"
    instead = "reference=, a function that runs the model on a fixed batch"

    def __init__(self, model: nn.Module, masks: Masks, trains: Callable[[], bool], renewed: Callable[[], bool]) -> None:
        super().__init__(model, trains)
        self._masks, self._renewed = masks, renewed
        self._given: tuple[Any, ...] | None = None  # args, kwargs
        self._mask: Mask | None = None

    @property
    def ready(self) -> bool:
        return self._given is not None

    def mask(self) -> Mask | None:
        """Return the mask of the first pass, for :class:`.masks.Masks`."""
        return self._mask

    def __call__(self) -> None:
        """Run the model; nothing that it returns is a metric."""
        assert self._given is not None
        self.run(*self._given)

    def parts(self) -> list[Any]:
        """Return the model's output for each third of the batch, if all its tensors have the same first dimension, of 3
        at least; else for the whole batch."""
        args, kwargs = self._given or ((), {})
        found = tensors((args, kwargs))  # an object may have more to it than its tensors' sizes
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in found or ()}
        if len(sizes) != 1 or (size := sizes.pop()) < PARTS:
            return [self.run(args, kwargs)]
        cuts = [size * part // PARTS for part in range(PARTS + 1)]
        parts = (each_tensor(lambda tensor, a=a, b=b: tensor[a:b], args=args, kwargs=kwargs) for a, b in pairwise(cuts))
        return [self.run(args, kwargs) for args, kwargs in parts]

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

    def wanted(self) -> bool:
        return self._given is None

    def beside(self) -> Mapping[str, Any]:
        if not self._renewed():
            self._masks.renew()
        return {"mask": self._masks.given()}

    def take(self, given: tuple[Any, ...]) -> None:
        *arguments, self._mask = given
        self._given = tuple(arguments)
        self.close()
