"""The curvature of the loss in Adam's coordinates, which decides where Adam becomes unstable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...decisive import CONVERGED
from ..base import CurvatureProbe, probe
from ..curvature.eigen import TOLERANCE, largest_eigenvalue
from ..curvature.hessian_products import Vector, adam_preconditioner, real, relative_rates
from ..curvature.landscape import Landscape
from ..parameters.pieces import Parameters
from ..rules import Mean
from .adam import groups_of, lacks_adam, states

COLD, WARM = 20, 4  # products beside that with the gradient: until an eigenvalue has converged, and from then on
# Shares of the gradient and of a random direction in the start of a search. Without them a search that starts at an
# eigenvector stays there, whatever other eigenvalue has become the largest.
MIXED = 0.05
UNITS = {  # of each column
    "value": "1 / learning rate",
    "to_edge": "ratio",
    "along_gradient": "1 / learning rate",
    "residual": "ratio",
    "converged": "1 or 0",
    "products": "products",
    "exact": "1 or 0",
}


class OfTheHessian(CurvatureProbe):
    """The largest eigenvalue of D H D, and the curvature along the gradient there, for a diagonal D."""

    tolerance: ClassVar[float] = TOLERANCE
    cold: ClassVar[int] = COLD

    def scale(self, landscape: Landscape) -> Vector | None:
        """Return D, one entry per parameter entry; None for D = 1."""
        return None

    def edge(self, landscape: Landscape) -> float:
        """Return the eigenvalue from which the optimizer is unstable; NaN if that is not known."""
        return math.nan

    def look(self, landscape: Landscape, memory: dict[str, Any]) -> Mapping[str, float]:
        scale, inner = self.scale(landscape), landscape.inner

        def scaled(vector: Vector) -> Vector:
            return vector if scale is None else [_times(s, v) for s, v in zip(scale, vector, strict=True)]

        with landscape.products() as product:

            def preconditioned(vector: Vector) -> Vector:
                return scaled(product(scaled(vector)))

            numbers: dict[str, float] = {"exact": float(landscape.way == "exact")}
            gradient = scaled(product.gradient)
            square = inner(gradient, gradient)
            if square > 0:
                numbers["along_gradient"] = inner(gradient, preconditioned(gradient)) / square
            start, known = scaled(landscape.random()), memory.get("vector")
            if known is not None and [own.shape for own in known] != [own.shape for own in start]:
                known = None  # of other parameters: some were frozen, or are trained now
            budget = WARM if known is not None and memory.get("converged") else self.cold
            if known is not None:
                start = _mixed(known, [gradient, start], inner)
            if inner(start, start) > 0:
                found = largest_eigenvalue(
                    preconditioned, start, products=budget, tolerance=self.tolerance, inner=inner
                )
                lacks = max(found.residual, numbers.get("along_gradient", -math.inf) - found.value)
                relative = lacks / abs(found.value) if found.value else math.inf
                memory["vector"] = found.vector if math.isfinite(found.value) else None
                memory["converged"] = relative <= CONVERGED
                numbers |= {"value": found.value, "residual": relative, "converged": float(relative <= CONVERGED)}
                numbers["to_edge"] = found.value / self.edge(landscape)
            numbers["products"] = float(product.count)
        return numbers


def _times(one: Tensor, other: Tensor) -> Tensor:
    """Return the product entry by entry, of real and imaginary parts separately."""
    if one.is_complex():
        return torch.view_as_complex(real(one) * real(other))
    return one * other


def _mixed(known: Vector, others: Sequence[Vector], inner: Callable[[Vector, Vector], float]) -> Vector:
    """Return ``known``, of unit length, plus a share of each of the others that has a length."""
    mixed = list(known)
    for other in others:
        size = math.sqrt(inner(other, other))
        if 0 < size < math.inf:
            mixed = [m + MIXED / size * o for m, o in zip(mixed, other, strict=True)]
    return mixed


@probe("preconditioned_sharpness", on="curvature", unit=UNITS, columns=dict.fromkeys(UNITS, Mean()), log=True)
class PreconditionedSharpness(OfTheHessian):
    """The largest curvature of the loss in the coordinates of Adam. ``value``: the largest eigenvalue of P^(-1/2) H
    P^(-1/2). H is the Hessian of a fixed batch's loss at theta_t. P is Adam's preconditioner at this row's update, (1 -
    beta1^t) (sqrt(v / (1 - beta2^t)) + eps); if parameter groups have learning rates of their own, P is multiplied by
    the largest rate over the rate of the entry's group. ``to_edge``: value over (2 + 2 beta1) / ((1 - beta1) lr), where
    lr is the largest rate. This threshold is 38 / lr at beta1 = .9; beyond it Adam is unstable (Cohen et al. 2022,
    2207.14484). ``along_gradient``: g'Hg / g'g in the same coordinates (2506.04805). ``residual``: the relative error
    that the value may have; if along_gradient exceeds the value, at least that excess. ``converged``: 1 if the residual
    is 5 % or less; rows with 0 decide nothing. ``products``: the number of Hessian-vector products of the row.
    ``exact``: 1 for products by a second differentiation, 0 for central differences of gradients.

    Look for a to_edge that rises to 1, where instability itself holds the largest eigenvalue. A to_edge far above 1 is
    typical of the beginning of a warm-up that is too short. to_edge is missing if groups differ in beta1 or all rates
    are 0.

    The method is Lanczos, from the vector of the last row, until the residual is 1 %.

    Cost: at most 5 products a row, the one with the gradient included; 21 at the first row and at a row after one that
    has not converged. A product costs about three forward-backward passes, and the graph of one pass stays in memory
    meanwhile.
    """

    undefined = frozenset({"residual"})

    def lacks(self, parameters: Parameters) -> str:
        reason = lacks_adam(parameters.optimizers)
        return f"{reason}: the probe sharpness is for any" if reason else super().lacks(parameters)

    def scale(self, landscape: Landscape) -> Vector:
        found = adam_preconditioner(*self._adams(landscape))
        _, rates = self._rates(landscape)
        return [own * math.sqrt(rate) for own, rate in zip(found, rates, strict=True)]

    def edge(self, landscape: Landscape) -> float:
        state, trained, groups = self._adams(landscape)
        betas = {float(groups[parameter]["betas"][0]) for parameter in trained if parameter in state}
        rate, _ = self._rates(landscape)
        if len(betas) != 1 or rate <= 0:
            return math.nan
        beta1 = betas.pop()
        return (2 + 2 * beta1) / ((1 - beta1) * rate)

    @staticmethod
    def _adams(landscape: Landscape) -> tuple[Mapping[Tensor, Any], Sequence[Tensor], Mapping[Tensor, Any]]:
        """Return (state, parameters, groups) of what an Adam updates; parameters of other optimizers have no state
        here."""
        return states(landscape.optimizers), landscape.trained(), groups_of(landscape.optimizers)

    def _rates(self, landscape: Landscape) -> tuple[float, list[float]]:
        """Return (largest rate, shares of it) of the parameters that an Adam has moved."""
        state, trained, groups = self._adams(landscape)
        return relative_rates(trained, {parameter: own for parameter, own in groups.items() if parameter in state})
