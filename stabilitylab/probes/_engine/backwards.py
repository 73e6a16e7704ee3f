"""The backward passes of a loop: which of them lead to the coming update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..places.sites import fields_of


class Backwards:
    """The backward passes of a row, and which of them lead to its update, by the gradients of ``parameters``.

    A backward of which a graph is made (``create_graph=True``) and that leaves no gradient on a parameter is part of a
    loss, as the gradient of a penalty is. Gradients that are gone (``zero_grad`` sets them to None) when the next
    forward begins belong to passes that the update does not follow: the first half of SAM, a discriminator that was run
    for its generator. A loop that overwrites gradients with zeros instead looks like one that accumulates:
    ``rewritten`` is True if something wrote to a gradient between a backward of the row and its next forward.

    ``looks``: True if the parameters tell. On several ranks they may be split, so that a graph ends at other tensors:
    there every backward counts. ``on_begin``: functions to call when a backward reaches what the model returned.
    """

    def __init__(self, parameters: Callable[[], Sequence[torch.Tensor]], looks: bool) -> None:
        self._parameters, self.looks = parameters, looks
        self.on_begin: list[Callable[[], None]] = []
        self._task, self._leads = -1, True  # the last backward of which a graph is made
        self._reached_by = -1  # the last backward that reached an output
        self.count = 0  # of the backwards of this row that left gradients
        self.rewritten = False
        self._witness: tuple[torch.Tensor, int] | None = None  # a gradient, and how often it was written to by then

    def start_row(self) -> None:
        self.count, self.rewritten, self._witness = 0, False, None

    def leads(self) -> bool:
        """Return True if the backward that runs leaves its gradients on parameters, or makes no graph."""
        if not self.looks or not torch.is_grad_enabled():
            return True
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._leads = task, any(map(_accumulates, self._parameters()))
        return self._leads

    def listen(self, output: Any) -> None:
        """Learn of the end of each backward that reaches what the model returned."""
        with suppress(Exception):  # of the caller's classes: training goes on
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    with suppress(RuntimeError):  # a tensor of another kind, which takes no hook
                        tensor.register_hook(self._reached)

    def thrown_away(self) -> bool:
        """Return True, once, if the gradients that backwards of this row left are gone."""
        if not self.count:
            return False
        if (left := self._left()) is not None:
            witness, version = self._witness or (None, 0)
            self.rewritten |= left is witness and left._version > version
            return False
        self.count = 0
        return True

    def _reached(self, _: torch.Tensor) -> None:
        if (task := torch._C._current_graph_task_id()) == self._reached_by:
            return  # by another output
        self._reached_by = task
        for call in self.on_begin:
            call()
        if self.looks and self.leads():
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._ended)

    def _ended(self) -> None:
        if (left := self._left()) is not None:
            self.count += 1
            self._witness = left, left._version

    def _left(self) -> torch.Tensor | None:
        """Return the first gradient that a parameter has."""
        return next((p.grad for p in self._parameters() if p.grad is not None), None)


def _accumulates(parameter: torch.Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns its gradient
        return False


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output, to the second level."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 2:
        if isinstance(value, Mapping):
            value = list(value.values())
        elif not isinstance(value, (tuple, list)):
            value = fields_of(value)
        for item in value:
            yield from _tensors(item, depth + 1)
