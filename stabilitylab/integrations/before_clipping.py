"""The moment between backward and clipping in Accelerate, and in the Trainer of Hugging Face, which uses Accelerate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Protocol

import torch

from ..errors import ResourceError, UsageError
from ..probes.parameters.layouts import local
from ..probes.state.bits import version

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ResourceError("Accelerate is not installed: pip install accelerate.") from error


Mark = tuple[torch.Tensor | None, int | None]  # a gradient, and autograd's count of writes to it


class Listener(Protocol):
    def loss(self, loss: torch.Tensor) -> None: ...

    def drop(self) -> None: ...

    def row(self) -> None: ...


class Seam:
    """Calls ``listener`` with each loss of an optimizer's Accelerator, and once per update when gradients can be read:
    those of the whole batch, averaged over ranks and unscaled, not clipped yet.

    A trainer gives its callbacks neither the accelerator nor a moment before clipping. Two methods of the class are
    therefore wrapped while any seam is open: ``Accelerator.backward`` and ``Accelerator.unscale_gradients``, with which
    ``clip_grad_norm_`` and ``clip_grad_value_`` begin. The ``step`` of this optimizer is wrapped for loops that do not
    clip. If the loop goes on without that step, the next backward that reaches the optimizer's gradients begins another
    update, and losses whose gradients are gone are dropped.
    """

    def __init__(self, optimizer: Any, listener: Listener) -> None:
        if not isinstance(optimizer, AcceleratedOptimizer):
            kind = type(optimizer).__name__
            raise UsageError(f"the optimizer is a plain {kind}: give the one that accelerator.prepare() returned.")
        kind = optimizer.accelerator_state.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise UsageError(f"{kind.value} keeps gradients of its own, which cannot be watched: use DDP or FSDP2.")
        self.optimizer, self.listener = optimizer, listener
        self.read = False  # True if the gradients of this update were read
        self._came = False  # True if the last backward left gradients
        self._before: list[Mark] | None = None  # of the gradients that were read, before another backward

    @property
    def inner(self) -> torch.optim.Optimizer:
        return unwrapped(self.optimizer)

    def belongs(self, accelerator: Accelerator) -> bool:
        return any(optimizer is self.optimizer for optimizer in accelerator._optimizers)

    def ready(self) -> None:
        if not self.read:
            self.read = True
            self.listener.row()

    def backward_begins(self) -> None:
        """Drop the loss so far if its gradients existed and are gone: they were dropped without an update."""
        if self._came and not self._has_gradients():
            self.listener.drop()
        self._before = self._marks() if self.read else None

    def backward_ended(self) -> None:
        before, self._before = self._before, None
        self._came = self._has_gradients()
        if before is not None and not all(map(_is_same, before, self._marks())):
            self.read = False  # the update whose gradients were read was not made

    def _gradients(self) -> Iterator[torch.Tensor | None]:
        return (parameter.grad for group in self.inner.param_groups for parameter in group["params"])

    def _has_gradients(self) -> bool:
        return any(gradient is not None for gradient in self._gradients())

    def _marks(self) -> list[Mark]:
        return [(gradient, None if gradient is None else version(local(gradient))) for gradient in self._gradients()]

    def open(self) -> None:
        if not _OPEN:
            for name, around in _AROUND.items():
                _BEFORE[name] = original = vars(Accelerator)[name]
                setattr(Accelerator, name, functools.wraps(original)(around(original)))
        _OPEN.append(self)
        # a learning-rate schedule may have wrapped the instance's ``step``: it needs a method, with its own mark
        self._step = vars(self.optimizer).get("step")
        self._wrapped = MethodType(
            functools.wraps(self.optimizer.step)(self._around(self.optimizer.step)), self.optimizer
        )
        self.optimizer.step = self._wrapped

    def close(self) -> None:
        if self not in _OPEN:
            return
        _OPEN.remove(self)
        if not _OPEN:
            for name, method in _BEFORE.items():
                setattr(Accelerator, name, method)
        if vars(self.optimizer).get("step") is not self._wrapped:
            return  # other code wrapped ``step`` since: ours, underneath, only calls the original from now on
        if self._step is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._step

    def _with_closure(self, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Step with a closure that computes the gradients. They are read after the first evaluation of the closure, or
        earlier if the closure clips them. The listener ignores later evaluations in the same step."""

        def reading() -> Any:
            result = closure()
            self.ready()
            return result

        self.read = False
        try:
            return step(reading)
        finally:
            self.read = False

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: AcceleratedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self not in _OPEN or not optimizer.gradient_state.sync_gradients:
                return original(closure)
            if closure is not None:
                return self._with_closure(original, closure)
            if not self.read and optimizer.scaler is not None:
                optimizer.scaler.unscale_(self.inner)  # nothing was clipped; the scaler's step would do it now
            self.ready()
            self.read = False  # the next backward belongs to another update
            return original()

        return step


def _is_same(one: Mark, other: Mark) -> bool:
    """Return True if nothing was written to a gradient between two marks of it."""
    return one[0] is other[0] and one[1] == other[1]


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


_OPEN: list[Seam] = []
_BEFORE: dict[str, Any] = {}


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> Any:
        seams = [seam for seam in _OPEN if seam.belongs(self)]
        for seam in seams:
            seam.backward_begins()
            seam.listener.loss(loss.detach() / self.gradient_accumulation_steps)  # as the original divides
        result = original(self, loss, **kwargs)
        for seam in seams:
            seam.backward_ended()
        return result

    return backward


def _unscale_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_gradients(self: Accelerator, optimizer: Any = None) -> None:
        original(self, optimizer)
        meant = None if optimizer is None else optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
        for seam in _OPEN:
            ours = meant is None or any(unwrapped(one) is seam.inner for one in meant)
            if ours and self.sync_gradients and seam.belongs(self):
                seam.ready()

    return unscale_gradients


_AROUND = {"backward": _backward, "unscale_gradients": _unscale_gradients}
