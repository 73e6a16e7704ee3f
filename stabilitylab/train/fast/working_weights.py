# pyright: reportPrivateImportUsage=false
"""Working weights: the bf16 matrices of a bf16 run, cast once an update instead of at each use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...models.sublayers import Linear


class WorkingWeights:
    """bf16 copies of the matrices and biases of ``model``, except those that another module uses too (a tied output).

    Under autocast each weight is cast at each use, and each gradient back. Here one call casts all weights
    (:meth:`refresh`, after each update), and one call passes a micro-batch's gradients on (:meth:`widen`); the numbers
    are the same. Passes without gradients, such as the held-out pass, read the weights themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        self.weights: list[Tensor] = []
        self._working: list[Tensor] = []
        self._modules: list[Linear] = []
        for module in model.modules():
            own = [p for p in (module.weight, module.bias) if p is not None] if isinstance(module, Linear) else []
            if isinstance(module, Linear) and all(uses[id(p)] == 1 for p in own):
                working = [p.detach().to(torch.bfloat16).requires_grad_() for p in own]
                self._modules.append(module)
                module.working = (working[0], working[1] if len(working) > 1 else None)
                self.weights += own
                self._working += working

    def refresh(self) -> None:
        """Copy the current weights into the working weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._working, self.weights)

    def widen(self) -> None:
        """Add the gradients of the working weights to those of the weights. A weight whose copy has no gradient gets
        none."""
        pairs = [(own, short.grad) for own, short in zip(self.weights, self._working, strict=True)]
        found = [(own, grad) for own, grad in pairs if grad is not None]
        with torch.no_grad():
            if first := [(own, grad) for own, grad in found if own.grad is None]:
                made = [torch.empty_like(own) for own, _ in first]
                torch._foreach_copy_(made, [grad for _, grad in first])
            if again := [(own.grad, grad) for own, grad in found if own.grad is not None]:
                torch._foreach_add_([grad for grad, _ in again], [grad for _, grad in again])
            for (own, _), grad in zip(first, made if first else (), strict=True):
                own.grad = grad
        self.forget()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Use the weights themselves, not the working weights, within this context, also in passes with gradients."""
        held = [(module, module.working) for module in self._modules]
        for module in self._modules:
            module.working = None
        try:
            yield
        finally:
            for module, working in held:
                module.working = working

    def forget(self) -> None:
        """Drop gradients that were not passed on, such as those of an update that failed."""
        for short in self._working:
            short.grad = None
