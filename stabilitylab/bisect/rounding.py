"""The control of a bisection: the same model, with the roundings of a dtype drawn anew several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..probes.places.naming import modules_of


class _Redrawn(torch.autograd.Function):
    """Multiply each entry by 1 + ``ulp`` u, u uniform in (-1, 1), and each entry of its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ulp: float, draw: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.ulp, ctx.draw = ulp, draw
        return value * (1 + ulp * draw(value))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient * (1 + ctx.ulp * ctx.draw(gradient)), None, None


@contextmanager
def redrawn(model: nn.Module, ulp: float, seed: int) -> Iterator[None]:
    """Draw the roundings of ``model`` anew inside this context: those of each parameter, of the output of each module
    with parameters of its own, and of the gradient of that output.

    An entry moves by at most one unit in the last place of the dtype whose spacing at 1 is ``ulp``; a parameter moves
    by at most half a unit, as in a cast. The parameters are restored bit for bit.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def draw(like: Tensor) -> Tensor:
        if like.device not in generators:
            generators[like.device] = torch.Generator(like.device).manual_seed(seed)
        kind = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        noise = torch.rand(like.shape, generator=generators[like.device], device=like.device, dtype=kind)
        return 2 * noise - 1

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return None
        return _Redrawn.apply(output, ulp, draw).to(output.dtype)  # pyright: ignore

    owners = [module for module in modules_of(model).values() if any(True for _ in module.parameters(recurse=False))]
    own = dict.fromkeys(parameter for module in owners for parameter in module.parameters(recurse=False))
    kept = [(parameter, parameter.detach().clone()) for parameter in own if parameter.is_floating_point()]
    handles = [module.register_forward_hook(move) for module in owners]
    try:
        with torch.no_grad():
            for parameter, _ in kept:
                parameter.mul_(1 + ulp / 2 * draw(parameter))
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
