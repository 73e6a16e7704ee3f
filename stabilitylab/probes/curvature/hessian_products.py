"""Products of the Hessian of a loss with a direction, exact or by differences, and Adam's preconditioner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..parameters.layouts import local, local_gradient

Vector = list[Tensor]  # one tensor per parameter


class HessianProducts:
    """H v for the Hessian H of ``loss()`` in ``parameters``, for many v; use it as a context manager.

    ``how``: "exact" differentiates the gradient once more, along a graph that is kept between products. It uses the
    attention kernel that has a second derivative (the math backend; fused kernels and compiled code have none).
    "differences" takes (g(theta + h v) - g(theta - h v)) / 2 h, with h |v| = cbrt(eps) / 5 (1e-3 in float32). It works
    wherever a gradient does, and counts the kinks (of a ReLU) that lie between; the parameters come back bit for bit.
    ``loss`` must give the same number each time: eval mode or fixed random states, a fixed batch. Raises ValueError for
    a parameter that does not require a gradient.

    On several ranks: ``backward`` takes gradients by backward(), as sharded parameters need (differences alone), and
    puts back what stood in ``.grad``; ``inner`` is the inner product of this rank's parts, over all ranks; ``mean``
    turns the gradient of this rank's loss into that of the mean over ranks.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        parameters: Sequence[Tensor],
        how: Literal["exact", "differences"] = "exact",
        *,
        backward: bool = False,
        inner: Callable[[Sequence[Tensor], Sequence[Tensor]], float] | None = None,
        mean: Callable[[Vector], Vector] | None = None,
    ) -> None:
        if any(not parameter.requires_grad for parameter in parameters):
            raise ValueError("a parameter without requires_grad has no curvature: leave it out.")
        if backward and how == "exact":
            raise ValueError("backward() keeps no graph of the gradient: take differences.")
        self.loss, self.parameters, self.how, self.backward = loss, list(parameters), how, backward
        self.inner, self.mean = inner or dot, mean or (lambda vector: vector)
        self.count = 0
        self.gradient: Vector = []

    @property
    def held(self) -> Vector:
        """This rank's parts of the parameters."""
        with torch.no_grad():
            return [local(parameter).detach() for parameter in self.parameters]

    def __enter__(self) -> HessianProducts:
        self._graph = self._gradient()
        self.gradient = self.mean([gradient.detach() for gradient in self._graph])
        return self

    def __exit__(self, *error: object) -> None:
        del self._graph

    def __call__(self, direction: Sequence[Tensor]) -> Vector:
        """Return H v, with v as one tensor per parameter."""
        self.count += 1
        return self._exact(direction) if self.how == "exact" else self._differences(direction)

    def _gradient(self) -> Vector:
        exact = self.how == "exact"
        with torch.enable_grad(), _twice_differentiable(exact):
            if self.backward:
                return self._by_backward()
            return list(
                torch.autograd.grad(
                    self.loss(), self.parameters, create_graph=exact, allow_unused=True, materialize_grads=True
                )
            )

    def _by_backward(self) -> Vector:
        before = [parameter.grad for parameter in self.parameters]
        try:
            for parameter in self.parameters:
                parameter.grad = None
            self.loss().backward()
            return [
                torch.zeros_like(own) if parameter.grad is None else local_gradient(parameter)
                for own, parameter in zip(self.held, self.parameters, strict=True)
            ]
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def _exact(self, direction: Sequence[Tensor]) -> Vector:
        used = [(g, v) for g, v in zip(self._graph, direction, strict=True) if g.requires_grad]
        if not used:
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        with _twice_differentiable(True):
            found = torch.autograd.grad(
                [g for g, _ in used],
                self.parameters,
                [v.to(g.dtype) for g, v in used],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return self.mean([each.detach() for each in found])

    def _differences(self, direction: Sequence[Tensor]) -> Vector:
        held = self.held
        size = math.sqrt(self.inner(direction, direction))
        if size == 0:
            return [torch.zeros_like(own) for own in held]
        eps = max(torch.finfo(own.dtype).eps for own in held)
        step = eps ** (1 / 3) / 5 / size
        ends = []
        for sign in (1.0, -1.0):
            with moved(held, direction, sign * step):
                ends.append([in_float64(gradient) for gradient in self._gradient()])
        return self.mean(
            [((above - below) / (2 * step)).to(own.dtype) for above, below, own in zip(*ends, held, strict=True)]
        )


@contextmanager
def moved(parameters: Sequence[Tensor], direction: Sequence[Tensor], step: float) -> Iterator[None]:
    """Set the parameters to theta + ``step`` v; on exit they are what they were, bit for bit. The change goes through
    ``.data``: a kept graph must not notice."""
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter, v in zip(parameters, direction, strict=True):
            parameter.data.add_(v.to(parameter.dtype), alpha=step)
        yield
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.data.copy_(old)


def _twice_differentiable(exact: bool) -> AbstractContextManager[Any]:
    """Return a context with the attention operators that have a second derivative, if products are ``exact``."""
    return sdpa_kernel(SDPBackend.MATH) if exact else nullcontext()


def dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the inner product, in float64; one host read."""
    parts = [inner_product(a, b) for a, b in zip(one, other, strict=True)]
    return float(torch.stack([part.to(parts[0].device) for part in parts]).sum()) if parts else 0.0


def inner_product(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner product of two tensors in float64, 0-dim. A complex entry counts as two real ones."""
    return (real(one).double() * real(other).double()).sum()


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as two real numbers an entry; any other tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_float64(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, or in complex128."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def adam_preconditioner(
    states: Mapping[Tensor, Mapping[str, Any]] | torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    groups: Mapping[Tensor, Mapping[str, Any]] | None = None,
) -> Vector:
    """Return P^(-1/2) of Adam at its present state, entry by entry: P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps).

    Cohen et al. 2022 (2207.14484), Eq. 4: Adam is preconditioned momentum, stable while the largest eigenvalue of
    P^(-1/2) H P^(-1/2) stays below (2 + 2 beta1) / ((1 - beta1) lr), which is 38 / lr at beta1 = .9. With amsgrad, v is
    the maximum by which Adam divides. Entries of parameters that the optimizer has not moved yet are 0: they take no
    part. The real and the imaginary part of a complex entry have a number each. ``states`` is an optimizer, or maps the
    parameters of several optimizers to their states; ``groups`` then maps them to their groups. P holds no learning
    rate: if groups have different rates, multiply by :func:`relative_rates`. Raises ValueError if no parameter has a
    second moment.
    """
    if isinstance(states, torch.optim.Optimizer):
        kind = type(states).__name__
        groups = {parameter: group for group in states.param_groups for parameter in group["params"]}
        states = states.state
    else:
        kind = "the optimizer"
    groups = groups or {}
    found: Vector = []
    seen = False
    for parameter in parameters:
        group, state = groups.get(parameter), states.get(parameter, {})
        if group is None or "exp_avg_sq" not in state:
            found.append(torch.zeros_like(local(parameter)))
            continue
        seen = True
        t = float(state["step"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        second = real(local(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]))
        root = (second.double() / (1 - beta2**t)).sqrt() + float(group["eps"])
        inverse = ((1 - beta1**t) * root).rsqrt()
        found.append((torch.view_as_complex(inverse) if parameter.is_complex() else inverse).to(parameter.dtype))
    if not seen:
        raise ValueError(
            f"{kind} keeps no second moment for these parameters: preconditioned sharpness is Adam's, after its first "
            "update."
        )
    return found


def relative_rates(
    parameters: Sequence[Tensor], groups: Mapping[Tensor, Mapping[str, Any]]
) -> tuple[float, list[float]]:
    """Return (the largest learning rate of these parameters, each parameter's rate over it); 0 for a parameter in no
    group.

    If groups have rates lr_g, the update is -D P^-1 m, with D the diagonal matrix of each entry's lr_g. This is Adam
    with the one rate lr = max lr_g and the preconditioner (D / lr)^-1 P, whose Hessian has the eigenvalues of
    (D / lr)^(1/2) P^(-1/2) H P^(-1/2) (D / lr)^(1/2). Adam is stable while the largest of them stays below
    (2 + 2 beta1) / ((1 - beta1) lr).
    """
    rates = [float(groups.get(parameter, {}).get("lr") or 0) for parameter in parameters]
    largest = max(rates, default=0.0)
    return largest, [rate / largest if largest > 0 else 0.0 for rate in rates]
