"""Products of the Hessian of a loss with a direction, exact or by differences, and Adam's preconditioner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Vector = list[Tensor]  # one tensor a parameter


class HessianProducts:
    """H v for the Hessian H of ``loss()`` in ``parameters``, over and over; use it as a context manager.

    ``how``: "exact" differentiates the gradient once more, along a graph that is kept between products, with the
    attention kernel that has a second derivative (the math backend; fused ones and compiled code have none).
    "differences" takes (g(theta + h v) - g(theta - h v)) / 2 h, with h |v| = cbrt(eps) max(1, |theta|), which works
    wherever a gradient does; the parameters come back bit for bit. ``loss`` must give the same number each time it is
    called: eval mode or fixed random states, a fixed batch. Parameters that do not require a gradient are refused.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        parameters: Sequence[Tensor],
        how: Literal["exact", "differences"] = "exact",
    ) -> None:
        if any(not parameter.requires_grad for parameter in parameters):
            raise ValueError("a parameter without requires_grad has no curvature: leave it out.")
        self.loss, self.parameters, self.how = loss, list(parameters), how
        self.count = 0
        self.gradient: Vector = []

    def __enter__(self) -> HessianProducts:
        with torch.enable_grad(), _twice_differentiable(self.how):
            loss = self.loss()
            found = torch.autograd.grad(
                loss, self.parameters, create_graph=self.how == "exact", allow_unused=True, materialize_grads=True
            )
        self._graph = found
        self.gradient = [gradient.detach() for gradient in found]
        return self

    def __exit__(self, *error: object) -> None:
        del self._graph

    def __call__(self, direction: Sequence[Tensor]) -> Vector:
        """H v, with v as one tensor a parameter."""
        self.count += 1
        return self._exact(direction) if self.how == "exact" else self._differences(direction)

    def _exact(self, direction: Sequence[Tensor]) -> Vector:
        used = [(g, v) for g, v in zip(self._graph, direction, strict=True) if g.requires_grad]
        if not used:
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        with _twice_differentiable(self.how):
            found = torch.autograd.grad(
                [g for g, _ in used],
                self.parameters,
                [v.to(g.dtype) for g, v in used],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return [each.detach() for each in found]

    def _differences(self, direction: Sequence[Tensor]) -> Vector:
        size = norm(direction)
        if size == 0:
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        eps = max(torch.finfo(parameter.dtype).eps for parameter in self.parameters)
        step = eps ** (1 / 3) * max(1.0, norm([parameter.detach() for parameter in self.parameters])) / size
        ends = []
        for sign in (1.0, -1.0):
            with moved(self.parameters, direction, sign * step), torch.enable_grad():
                found = torch.autograd.grad(self.loss(), self.parameters, allow_unused=True, materialize_grads=True)
            ends.append([gradient.double() for gradient in found])
        return [
            ((above - below) / (2 * step)).to(parameter.dtype)
            for above, below, parameter in zip(*ends, self.parameters, strict=True)
        ]


@contextmanager
def moved(parameters: Sequence[Tensor], direction: Sequence[Tensor], step: float) -> Iterator[None]:
    """The parameters at theta + ``step`` v; afterwards what they were, bit for bit. ``.data``: a kept graph must not
    notice."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter, v in zip(parameters, direction, strict=True):
            parameter.data.add_(v.to(parameter.dtype), alpha=step)
        yield
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.data.copy_(old)


@contextmanager
def _twice_differentiable(how: str) -> Iterator[None]:
    """Attention by operators that have a second derivative."""
    if how != "exact":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The inner product, in float64; one host read."""
    parts = [(a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)]
    return float(torch.stack([part.to(parts[0].device) for part in parts]).sum()) if parts else 0.0


def norm(vector: Sequence[Tensor]) -> float:
    """The Euclidean norm of all entries together."""
    return math.sqrt(dot(vector, vector))


def adam_preconditioner(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Vector:
    """P^(-1/2) of Adam at its present state, an entry each: P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps).

    Cohen et al. 2022 (2207.14484), Eq. 4: Adam is preconditioned momentum, stable while the largest eigenvalue of
    P^(-1/2) H P^(-1/2) stays below (2 + 2 beta1) / ((1 - beta1) lr), which is 38 / lr at beta1 = .9. Entries of
    parameters that the optimizer has not moved yet are 0: they take no part. Raises ValueError for an optimizer that
    keeps no second moment.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    found: Vector = []
    seen = False
    for parameter in parameters:
        group, state = groups.get(id(parameter)), optimizer.state.get(parameter, {})
        if group is None or "exp_avg_sq" not in state:
            found.append(torch.zeros_like(parameter))
            continue
        seen = True
        t = float(state["step"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        root = (state["exp_avg_sq"].double() / (1 - beta2**t)).sqrt() + float(group["eps"])
        found.append(((1 - beta1**t) * root).rsqrt().to(parameter.dtype))
    if not seen:
        raise ValueError(
            f"{type(optimizer).__name__} keeps no second moment for these parameters: preconditioned sharpness is "
            "Adam's, after its first update."
        )
    return found
