# pyright: reportPrivateImportUsage=false
"""AdamW without the host's work: thousands of small parameters updated with a few calls from Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# refuses a capture without capturable=True, whose learning rate would stay what it was; renamed after torch 2.6
CAPTURE_CHECK = next(
    name
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    if hasattr(torch.optim.Optimizer, name)
)


@dataclass(frozen=True)
class _Lists:
    """What the fused kernel takes, of those parameters of a group that have a gradient."""

    present: tuple[bool, ...]
    parameters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]  # the elements of ``count``, each a view
    count: Tensor  # (parameters,)


class LeanAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW(fused=True)``, bit for bit and on any device, with its lists gathered once, not every update.

    The step counts lie in one tensor, so that one operator counts for all; ``state[p]["step"]`` is a view of it. State
    and ``state_dict()`` are those of AdamW: each loads what the other saved. A parameter without a gradient is left
    alone. No host read: an update can be captured in a CUDA graph, ``lr`` then being a 0-dim tensor on the device.

    Not for DTensors (FSDP2), nor with a ``GradScaler`` that unscales inside the step: it unscales before it.
    """

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
        super().__setstate__(state)  # loading comes through here too
        self._lists = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """:meth:`step` without its hooks, which a subclass's own has."""
        getattr(self, CAPTURE_CHECK)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            gradients = [parameter.grad for parameter in group["params"]]
            present = tuple([gradient is not None for gradient in gradients])
            lists = self._lists.get(number)
            if lists is None or lists.present != present:
                lists = self._lists[number] = self._gathered(group, present)
            if not lists.parameters:
                continue
            lists.count.add_(1)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                lists.parameters,
                [gradient for gradient in gradients if gradient is not None],
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

    def _gathered(self, group: dict[str, Any], present: tuple[bool, ...]) -> _Lists:
        """The group's lists; makes the state that is missing and moves the step counts into a tensor of their own."""
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
        """Makes the state as AdamW's fused step does; by hand, as torch's own maker differs between versions."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise RuntimeError("AdamW takes no sparse gradients: build the embedding with sparse=False")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
