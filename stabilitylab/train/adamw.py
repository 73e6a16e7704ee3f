# pyright: reportPrivateImportUsage=false
"""AdamW with less work on the host: thousands of small parameters are updated with a few calls from Python."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# This method refuses a capture without capturable=True, which would freeze the learning rate; renamed after torch 2.6.
CAPTURE_CHECK = next(
    name
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    if hasattr(torch.optim.Optimizer, name)
)


def _direct(name: str) -> Any:
    """Return the method of torch's optimizers without the import of torch._dynamo (1.5 s) with which it begins.

    That import keeps the method out of compiled code, which exists only after other code has imported torch._dynamo.
    """
    guarded = getattr(torch.optim.AdamW, name)
    plain = getattr(guarded, "__wrapped__", guarded)

    @functools.wraps(plain)
    def method(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        return (guarded if "torch._dynamo" in sys.modules else plain)(self, *args, **options)

    return method


@dataclass(frozen=True)
class _Lists:
    """The arguments of the fused kernel, for the parameters of a group that have a gradient."""

    present: tuple[bool, ...]
    parameters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]  # the elements of ``count``, each a view
    count: Tensor  # (parameters,)


class LeanAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)``, bit for bit and on any device, with its lists gathered once instead of at
    every update.

    The step counts lie in one tensor, so that one operator increments all of them; ``state[p]["step"]`` is a view of
    that tensor. State and ``state_dict()`` are those of AdamW: each optimizer loads a state that the other saved. A
    parameter without a gradient stays unchanged. An update reads nothing back to the host, so it can be captured in a
    CUDA graph; ``lr`` is then a 0-dim tensor on the device. DTensors (FSDP2) are not supported, nor a ``GradScaler``
    that unscales inside the step: unscale the gradients before the step.
    """

    add_param_group = _direct("add_param_group")
    zero_grad = _direct("zero_grad")
    state_dict = _direct("state_dict")
    load_state_dict = _direct("load_state_dict")

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        capturable: bool = False,
    ) -> None:
        self._lists: dict[int, _Lists] = {}
        super().__init__(parameters, lr, betas, eps, weight_decay, fused=True, capturable=capturable)
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict() calls this too
        self._lists = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Do :meth:`step` without its hooks; the ``step`` of a subclass has its own hooks."""
        getattr(self, CAPTURE_CHECK)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, group, lists, gradients in self._with_gradients():
            lists.count.add_(1)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                lists.parameters,
                gradients,
                lists.means,
                lists.squares,
                [],
                lists.steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return loss

    def _with_gradients(self) -> Iterator[tuple[int, dict[str, Any], _Lists, list[Tensor]]]:
        """Yield the number of each group that has gradients, the group, its lists and the gradients."""
        for number, group in enumerate(self.param_groups):
            gradients = [parameter.grad for parameter in group["params"]]
            present = tuple([gradient is not None for gradient in gradients])
            lists = self._lists.get(number)
            if lists is None or lists.present != present:
                lists = self._lists[number] = self._gathered(group, present)
            if lists.parameters:
                yield number, group, lists, [gradient for gradient in gradients if gradient is not None]

    def _gathered(self, group: dict[str, Any], present: tuple[bool, ...]) -> _Lists:
        """Return the lists of the group. Missing state is created, and the step counts move into a tensor of their
        own."""
        parameters = list(itertools.compress(group["params"], present))
        if not parameters:
            return _Lists(present, [], [], [], [], torch.empty(0))
        states = [self._state_of(parameter) for parameter in parameters]
        count = torch.stack([state["step"] for state in states])
        for state, step in zip(states, views := list(count.unbind()), strict=True):
            state["step"] = step
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        return _Lists(present, parameters, means, squares, views, count)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter. A missing state is created as AdamW's fused step creates it; torch's own
        function for that differs between versions."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients: build the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
