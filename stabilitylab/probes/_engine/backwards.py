"""The backward passes of a loop: which of them lead to the coming update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..places.sites import fields_of

_engine: Any = torch.autograd.Variable._execution_engine


class Kind(Enum):
    """The kinds of backwards. LEAVES: leaves gradients on parameters. RETURNS: ``torch.autograd.grad`` returns them.
    PENALTY: the same, with a graph."""

    LEAVES, RETURNS, PENALTY = range(3)


class LeftGradient(NamedTuple):
    """The first parameter that had a gradient after a backward, that gradient, and how often it was written to."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int


class Backwards:
    """The backward passes of a row, and which of them lead to its update, by the gradients of ``parameters``. The
    gradients of ``stepped``, the parameters that optimizers hold, tell which passes were thrown away.

    A backward of which a graph is made (``create_graph=True``) and that leaves no gradient on a parameter is part of a
    loss, as the gradient of a penalty is. Gradients that ``torch.autograd.grad`` returns are those of the update only
    if no backward of the row leaves gradients on parameters; else they are a saliency, weights of tasks or an
    adversarial example. Gradients that are gone (``zero_grad`` sets them to None, or to zeros) when the next forward or
    backward begins belong to passes that the update does not follow: the first half of SAM, a discriminator that was
    run for its generator, a backward that raised.

    ``looks``: True if the parameters tell. On several ranks they may be split, so that a graph ends at other tensors:
    there every backward counts. ``on_reach``: the function to call before a backward leaves gradients that lead to the
    update, with True if it was noticed inside the model, where some may have been left already. ``on_pass``: the
    function to call with the number of each pass that such a backward reaches, or one that makes a graph. ``on_begin``:
    functions to call when a backward reaches what the model returned. ``on_first``: functions to call when gradients
    were returned in the row, and the first backward comes that leaves some.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[torch.Tensor]],
        looks: bool,
        stepped: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._parameters, self.looks, self._stepped = parameters, looks, stepped
        self.on_reach: Callable[[bool], None] = lambda inside: None
        self.on_pass: Callable[[int], None] = lambda number: None
        self.on_begin: list[Callable[[], None]] = []
        self.on_first: list[Callable[[], None]] = []
        self._task, self._kind = -1, Kind.LEAVES  # the last backward
        self._left_some = self._returned = False  # the kinds of backwards that this row has
        self._reached_by = -1  # the last backward that reached an output
        self.count = 0  # of the backwards of this row that left gradients
        self._witness: LeftGradient | None = None
        self._unfinished = False  # a backward has begun and not come to its end

    def start_row(self) -> None:
        self.count, self._witness = 0, None
        self._left_some = self._returned = self._unfinished = False

    def leads(self) -> bool:
        """Return True if the backward that runs leads to the update, as far as this row tells so far."""
        if not self.looks:
            return True
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._kind = task, self._kind_now()
        if self._kind is Kind.RETURNS:
            self._returned |= not self._left_some
            return not self._left_some
        if self._kind is Kind.LEAVES and not self._left_some:
            self._left_some = True
            for call in self.on_first if self._returned else ():
                call()
        return self._kind is Kind.LEAVES

    @property
    def leaves(self) -> bool:
        """True if the backward that runs, of which :meth:`leads` was asked, leaves gradients on parameters."""
        return self.looks and self._kind is Kind.LEAVES

    def _kind_now(self) -> Kind:
        """Return the kind of the backward that runs."""
        makes_graph = torch.is_grad_enabled()
        if not makes_graph and _is_whole():
            return Kind.LEAVES
        with torch.enable_grad():  # else a parameter does not tell where its gradient goes
            if any(map(_accumulates, self._parameters())):
                return Kind.LEAVES
        return Kind.PENALTY if makes_graph else Kind.RETURNS

    def listen(self, output: Any, number: int, inside: bool = False) -> bool:
        """Learn of each backward that reaches what the model returned in the pass of this ``number``, or a value
        ``inside`` of it. Return True if there is a tensor that tells."""
        found = False
        reached = partial(self._reached, number, inside)
        with suppress(Exception):  # of the caller's classes: training goes on
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    with suppress(RuntimeError):  # a tensor of another kind, which takes no hook
                        tensor.register_hook(reached)
                        found = True
        return found

    def thrown_away(self) -> bool:
        """Return True, once, if the gradients that backwards of this row left are gone when a forward begins."""
        if not (self.count or self._unfinished):
            return False
        if self._left() is not None and not self._zeroed(self._stepped()):
            return False
        self.count, self._unfinished = 0, False
        return True

    def thrown_before(self, inside: bool) -> bool:
        """Return True, once, if the gradients that backwards of this row left are gone when a backward begins.
        ``inside``: this backward may have left some already, on parameters that come last."""
        if not (self.count or self._unfinished):
            return False
        gone = inside and self._witness is not None and self._witness.parameter.grad is None
        if not gone and self._left() is not None and not self._zeroed([] if inside else self._stepped()):
            return False
        self.count, self._unfinished = 0, False
        return True

    def _zeroed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return True if something has set the gradients that the last backward left to zero: that of the witness, and
        those of these ``parameters``. They are read only where something has written to that of the witness: the
        device is asked once for that of the witness, and once for all others if that one is zero."""
        if (witness := self._witness) is None:
            return False
        gradient = witness.parameter.grad
        if gradient is None or gradient is not witness.gradient or gradient._version == witness.version:
            return False
        if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        with suppress(NotImplementedError, RuntimeError):  # of layouts whose entries cannot be counted
            if gradient.count_nonzero():
                return False
            rest = [p.grad.count_nonzero().to(gradient.device) for p in parameters if p.grad is not None]
            return not rest or not torch.stack(rest).any()
        return False

    def _reached(self, number: int, inside: bool, _: torch.Tensor) -> None:
        again = (task := torch._C._current_graph_task_id()) == self._reached_by  # by another output
        self._reached_by = task
        leaves = self.looks and self.leads() and self.leaves
        if leaves and not again:
            self.on_reach(inside)
        if self.looks and self._kind is not Kind.RETURNS:
            self.on_pass(number)
        if again:
            return
        for call in self.on_begin:
            call()
        if leaves:
            self._unfinished = True
            _engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self._unfinished = False
        if left := self._left():
            self.count += 1
            self._witness = left

    def _left(self) -> LeftGradient | None:
        """Return the first gradient that an optimizer would find."""
        for parameter in self._stepped():
            if (gradient := parameter.grad) is not None:
                return LeftGradient(parameter, gradient, gradient._version)
        return None


def _accumulates(parameter: torch.Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns its gradient
        return False


def _is_whole() -> bool:
    """Return True in a hook of a backward that goes through all of its graph, as ``backward()`` without ``inputs=``
    does. The parameters cannot show this if all of them are inside reentrant checkpoints."""
    if not _engine.is_checkpoint_valid():
        return False
    node: Any = torch._C._current_autograd_node()
    try:  # at a tensor whose gradient is returned, the engine itself does not tell yet
        return node is None or any(
            torch._C._will_engine_execute_node(after) for after, _ in node.next_functions if after is not None
        )
    except RuntimeError:
        return False


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output, to the second level."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 2:
        if isinstance(value, Mapping):
            value = list(value.values())
        elif not isinstance(value, (tuple, list)):
            own = getattr(value, "__dict__", {}) if not isinstance(value, (type, nn.Module)) else {}
            value = [*fields_of(value), *own.values()]
        for item in value:
            yield from _tensors(item, depth + 1)
