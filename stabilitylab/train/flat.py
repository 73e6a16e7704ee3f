"""AdamW over one buffer: parameters and moments lie end to end, and an update is one kernel instead of thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw


class FlatAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW(fused=True)`` whose tensors are views of four buffers: theta, m, v and a gathered gradient.

    The parameters stay what they are but for where they lie, ``state`` holds a view of each moment for each parameter,
    and ``state_dict`` is that of AdamW, in both directions. All parameters must have one type and lie on one device,
    since their memory becomes part of one buffer; moving the model afterwards undoes that, and then, as from the first
    update in which a parameter has no gradient, updates go parameter by parameter. Same formula and kernel as AdamW:
    equal bit for bit on a GPU, on a CPU to the rounding of the few entries that end a tensor.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        capturable: bool = False,
    ) -> None:
        same = {"amsgrad": False, "maximize": False, "foreach": None, "differentiable": False, "fused": True}
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(parameters, own | same)
        self._all: list[Parameter] = self.param_groups[0]["params"]
        self._theta = torch.cat([parameter.detach().reshape(-1) for parameter in self._all])
        self._gradient, self._m, self._v = (torch.zeros_like(self._theta) for _ in range(3))
        self._step = torch.zeros((), device=self._theta.device)
        for parameter, place in zip(self._all, self._views(self._theta), strict=True):
            parameter.data = place
        self._places = [parameter.data_ptr() for parameter in self._all]
        self.together = True
        for parameter, m, v in zip(self._all, self._views(self._m), self._views(self._v), strict=True):
            self.state[parameter] = {"step": self._step, "exp_avg": m, "exp_avg_sq": v}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [parameter.grad for parameter in self._all]
        if self.together and not self._still_together(gradients):
            self._part()
        if self.together:
            torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None], out=self._gradient)
            self._apply([self._theta], [self._gradient], [self._m], [self._v], [self._step])
            return loss
        updated = [(p, g, self.state[p]) for p, g in zip(self._all, gradients, strict=True) if g is not None]
        moments = ([state[name] for _, _, state in updated] for name in ("exp_avg", "exp_avg_sq", "step"))
        self._apply([p for p, _, _ in updated], [g for _, g, _ in updated], *moments)
        return loss

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        # an optimizer that counts each parameter by itself would count a common step once for each
        state["state"] = {n: own | {"step": own["step"].clone()} for n, own in state["state"].items()}
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        rate, capturable = self.param_groups[0]["lr"], self.param_groups[0]["capturable"]
        super().load_state_dict(state_dict)
        group = self.param_groups[0]
        # not the checkpoint's matter, which another device may have written: a recorded update reads its rate there
        group |= {"lr": rate.fill_(group["lr"]) if isinstance(rate, Tensor) else float(group["lr"])}
        group["capturable"] = capturable
        self._all = self.param_groups[0]["params"]
        loaded = [self.state[parameter] for parameter in self._all]
        steps = torch.stack([state["step"] for state in loaded]).unique()
        self.together = self._in_place() and len(steps) == 1
        if self.together:
            self._step.copy_(steps[0])
            for state, m, v in zip(loaded, self._views(self._m), self._views(self._v), strict=True):
                state |= {
                    "step": self._step,
                    "exp_avg": m.copy_(state["exp_avg"]),
                    "exp_avg_sq": v.copy_(state["exp_avg_sq"]),
                }

    def _apply(self, theta: list[Any], gradients: list[Any], m: list[Any], v: list[Any], steps: list[Any]) -> None:
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        adamw(
            theta,
            gradients,
            m,
            v,
            [],
            steps,
            fused=True,
            capturable=group["capturable"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _views(self, buffer: Tensor) -> list[Tensor]:
        pieces = buffer.split([parameter.numel() for parameter in self._all])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._all, strict=True)]

    def _still_together(self, gradients: Sequence[Tensor | None]) -> bool:
        return all(g is not None and g.layout is torch.strided for g in gradients) and self._in_place()

    def _in_place(self) -> bool:
        return [parameter.data_ptr() for parameter in self._all] == self._places

    def _part(self) -> None:
        self.together = False
        for parameter in self._all:
            self.state[parameter]["step"] = self._step.clone()
