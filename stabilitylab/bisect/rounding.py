"""The control of a bisection: the same model, with the roundings of a dtype drawn anew several times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..probes.places.naming import modules_of

# Root mean square of the error of a running sum of n terms of random signs, in ulp sqrt(n) of the sum's own root mean
# square: each addition rounds by .21 ulp of the sum so far (uniform, half an ulp at most, over all mantissas), and
# sum over k of .21^2 k = .15^2 n^2.
RUNNING_SUM = 0.15


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
def redrawn(model: nn.Module, ulp: float, seed: int, sums_ulp: float = 0.0) -> Iterator[None]:
    """Draw the roundings of ``model`` anew inside this context: those of each parameter, of the output of each module
    with parameters of its own, and of the gradient of that output.

    An entry moves by at most one unit in the last place of the dtype whose spacing at 1 is ``ulp``; a parameter moves
    by at most half a unit, as in a cast. The parameters are restored bit for bit.

    The gradient of a bias or of the gain of a norm is a sum over all tokens, that of an embedding a sum over those of
    one kind. Some kernels keep this sum in the dtype of the parameter (PyTorch's LayerNorm and embedding do on a CPU in
    bfloat16), and n terms then cost .15 ulp sqrt(n) of it. ``sums_ulp``: the spacing at 1 of that dtype; 0 redraws no
    sum.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def draw(like: Tensor) -> Tensor:
        if like.device not in generators:
            generators[like.device] = torch.Generator(like.device).manual_seed(seed)
        kind = torch.float32 if like.dtype.itemsize < 4 else like.dtype
        noise = torch.rand(like.shape, generator=generators[like.device], device=like.device, dtype=kind)
        return 2 * noise - 1

    terms: dict[nn.Parameter, Tensor | int] = {}  # parameter -> number of terms in each entry, or row, of its gradient

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return None
        for parameter, count in _terms(module, args, output):
            terms[parameter] = terms.get(parameter, 0) + count
        return _Redrawn.apply(output, ulp, draw).to(output.dtype)  # pyright: ignore

    def summed(parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            if gradient.is_sparse:
                return gradient
            size = gradient.double().square().mean(-1, keepdim=True).sqrt()
            count = torch.as_tensor(terms.get(parameter, 0), device=gradient.device)
            spread = math.sqrt(3) * RUNNING_SUM * sums_ulp * size * count.sqrt()
            return gradient + (spread * draw(gradient)).to(gradient.dtype)

        return hook

    owners = [module for module in modules_of(model).values() if any(True for _ in module.parameters(recurse=False))]
    own = dict.fromkeys(parameter for module in owners for parameter in module.parameters(recurse=False))
    kept = [(parameter, parameter.detach().clone()) for parameter in own if parameter.is_floating_point()]

    handles = [module.register_forward_hook(move) for module in owners]
    if sums_ulp:
        summing = dict.fromkeys(p for module in owners for p in _summing(module) if p.requires_grad)
        handles += [parameter.register_hook(summed(parameter)) for parameter in summing]
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


def _summing(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's own parameters whose gradient is a sum over tokens: biases, gains, and an embedding."""
    own = [parameter for parameter in module.parameters(recurse=False) if parameter.numel()]
    return own if isinstance(module, nn.Embedding) else [parameter for parameter in own if parameter.dim() == 1]


def _terms(module: nn.Module, args: Any, output: Tensor) -> Iterator[tuple[nn.Parameter, Tensor | int]]:
    """Yield each of these parameters with the number of terms in an entry of its gradient; of an embedding, (rows, 1):
    how often each row was read."""
    for parameter in _summing(module):
        if not isinstance(module, nn.Embedding):
            yield parameter, output.numel() // parameter.numel()
        elif args:
            yield parameter, torch.bincount(args[0].flatten(), minlength=len(parameter))[:, None]
