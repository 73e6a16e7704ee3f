"""The backward passes of a loop: which of them lead to the coming update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class Backwards:
    """Tells backwards that the optimizer will see from others, by the gradients of ``parameters``.

    A backward of which a graph is made (``create_graph=True``) and that leaves no gradient on a parameter is part of a
    loss, as the gradient of a penalty is. Gradients that are gone (``zero_grad`` sets them to None) when the next
    forward begins belong to passes that the update does not follow: the first half of SAM, a discriminator that was run
    for its generator. A loop that overwrites gradients with zeros instead looks like one that accumulates.
    """

    def __init__(self, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._task, self._leads = -1, True
        self._left = False  # a backward of this row has left gradients
        self.count = 0  # of the backwards of this row that left gradients

    def start_row(self) -> None:
        self._left, self.count = False, 0

    def leads(self) -> bool:
        """Return True if the backward that runs leaves its gradients on parameters, or makes no graph."""
        if not torch.is_grad_enabled():
            return True
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._leads = task, any(map(_accumulates, self._parameters()))
        return self._leads

    def listen(self, output: Any) -> None:
        """Learn of the end of each backward that reaches what the model returned."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                with suppress(RuntimeError):  # a tensor of another kind, which takes no hook
                    tensor.register_hook(self._reached)

    def thrown_away(self) -> bool:
        """Return True, once, if the gradients that backwards of this row left are gone."""
        if not self._left or any(p.grad is not None for p in self._parameters()):
            return False
        self._left, self.count = False, 0
        return True

    def _reached(self, _: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._ended)

    def _ended(self) -> None:
        if any(p.grad is not None for p in self._parameters()):
            self._left = True
            self.count += 1


def _accumulates(parameter: torch.Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns its gradient
        return False


def tensors_of(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output, to the second level."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 2:
        if isinstance(value, Mapping):
            value = list(value.values())
        elif not isinstance(value, (tuple, list)):
            value = [getattr(value, name) for name in getattr(type(value), "__dataclass_fields__", ())]
        for item in value:
            yield from tensors_of(item, depth + 1)
