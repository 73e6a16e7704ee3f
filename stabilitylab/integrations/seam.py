"""Where Accelerate, and with it the Trainer of Hugging Face, tells what a watcher needs: between backward and clipping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import ResourceError, UsageError

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ResourceError("Accelerate is not installed: pip install accelerate.") from error


class Listener(Protocol):
    def loss(self, loss: torch.Tensor) -> None: ...

    def row(self) -> None: ...


class Seam:
    """Tells ``listener`` each loss of an optimizer's Accelerator, and once per update that gradients are ready to read:
    those of the whole batch, averaged over ranks and unscaled, not clipped yet.

    A trainer gives its callbacks neither the accelerator nor a moment before clipping. So three methods of Accelerate's
    classes are wrapped while any seam is open: ``Accelerator.backward``; ``Accelerator.unscale_gradients``, with which
    ``clip_grad_norm_`` and ``clip_grad_value_`` begin; and ``AcceleratedOptimizer.step``, for loops that do not clip.
    """

    def __init__(self, optimizer: Any, listener: Listener) -> None:
        if not isinstance(optimizer, AcceleratedOptimizer):
            kind = type(optimizer).__name__
            raise UsageError(f"the optimizer is a plain {kind}: give the one that accelerator.prepare() returned.")
        kind = optimizer.accelerator_state.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise UsageError(f"{kind.value} keeps gradients of its own, which cannot be watched: use DDP or FSDP2.")
        self.optimizer, self.listener = optimizer, listener
        self.read = False  # whether this update's gradients were

    @property
    def inner(self) -> torch.optim.Optimizer:
        return unwrapped(self.optimizer)

    def belongs(self, accelerator: Accelerator) -> bool:
        return any(optimizer is self.optimizer for optimizer in accelerator._optimizers)

    def ready(self) -> None:
        if not self.read:
            self.read = True
            self.listener.row()

    def open(self) -> None:
        if not _OPEN:
            for (owner, name), around in _AROUND.items():
                _BEFORE[owner, name] = vars(owner)[name]
                setattr(owner, name, functools.wraps(vars(owner)[name])(around(vars(owner)[name])))
        _OPEN.append(self)

    def close(self) -> None:
        if self in _OPEN:
            _OPEN.remove(self)
            if not _OPEN:
                for (owner, name), method in _BEFORE.items():
                    setattr(owner, name, method)


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


_OPEN: list[Seam] = []
_BEFORE: dict[tuple[type, str], Any] = {}


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> Any:
        for seam in list(_OPEN):
            if seam.belongs(self):
                seam.listener.loss(loss.detach() / self.gradient_accumulation_steps)  # as the original divides
        return original(self, loss, **kwargs)

    return backward


def _unscale_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_gradients(self: Accelerator, optimizer: Any = None) -> None:
        original(self, optimizer)
        meant = None if optimizer is None else optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
        for seam in list(_OPEN):
            ours = meant is None or any(unwrapped(one) is seam.inner for one in meant)
            if ours and self.sync_gradients and seam.belongs(self):
                seam.ready()

    return unscale_gradients


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: AcceleratedOptimizer, closure: Any = None) -> Any:
        seams = [seam for seam in _OPEN if seam.optimizer is self and self.gradient_state.sync_gradients]
        for seam in seams:
            if not seam.read and self.scaler is not None:
                self.scaler.unscale_(seam.inner)  # nothing was clipped, so nothing has; step() would do it now
            seam.ready()
        result = original(self, closure)
        for seam in seams:
            seam.read = False
        return result

    return step


_AROUND: dict[tuple[type, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    (Accelerator, "backward"): _backward,
    (Accelerator, "unscale_gradients"): _unscale_gradients,
    (AcceleratedOptimizer, "step"): _step,
}
