"""How curved the loss is in the coordinates that Adam sees: the number that its edge of stability is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ..base import CurvatureProbe, probe
from ..curvature.eigen import TOLERANCE, largest_eigenvalue
from ..curvature.landscape import Landscape
from ..curvature.products import Vector, adam_preconditioner
from ..parameters.pieces import Parameters
from ..rules import Mean
from .adam import groups_of, is_adam, states, unwrapped

COLD, WARM = 20, 4  # products beside that with the gradient: until an eigenvector was found, and from then on
COLUMNS = ("value", "to_edge", "along_gradient", "residual", "converged", "products", "exact")
UNIT = {
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
        """D, an entry each; None for 1."""
        return None

    def edge(self, landscape: Landscape) -> float:
        """The eigenvalue from which the optimizer is unstable; NaN where that is not known."""
        return math.nan

    def look(self, landscape: Landscape, memory: dict[str, Any]) -> Mapping[str, float]:
        scale, inner = self.scale(landscape), landscape.inner

        def scaled(vector: Vector) -> Vector:
            return vector if scale is None else [s * v for s, v in zip(scale, vector, strict=True)]

        with landscape.products() as product:

            def preconditioned(vector: Vector) -> Vector:
                return scaled(product(scaled(vector)))

            numbers: dict[str, float] = {"exact": float(landscape.way == "exact")}
            gradient = scaled(product.gradient)
            square = inner(gradient, gradient)
            if square > 0:
                numbers["along_gradient"] = inner(gradient, preconditioned(gradient)) / square
            start = memory.get("vector")
            budget = self.cold if start is None else WARM
            start = scaled(landscape.random()) if start is None else start
            if inner(start, start) > 0:
                found = largest_eigenvalue(
                    preconditioned, start, products=budget, tolerance=self.tolerance, inner=inner
                )
                memory["vector"] = found.vector if math.isfinite(found.value) else None
                relative = found.residual / abs(found.value) if found.value else math.inf
                numbers |= {"value": found.value, "residual": relative, "converged": float(found.converged)}
                numbers["to_edge"] = found.value / self.edge(landscape)
            numbers["products"] = float(product.count)
        return numbers


@probe("preconditioned_sharpness", on="curvature", unit=UNIT, columns={column: Mean() for column in COLUMNS}, log=True)
class PreconditionedSharpness(OfTheHessian):
    """value: largest eigenvalue of P^(-1/2) H P^(-1/2), H the Hessian of a fixed batch's loss at theta_t, P Adam's
    preconditioner at this row's update, (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps). to_edge: value over
    (2 + 2 beta1) / ((1 - beta1) lr), which is 38 / lr at beta1 = .9, beyond which Adam is unstable (Cohen et al. 2022,
    2207.14484). along_gradient: g'Hg / g'g in the same coordinates (2506.04805). residual: how far the value may be
    off, relative; converged: 1 where that is 1 % or less. exact: 1 for products by a second differentiation, 0 for
    central differences of gradients.

    Look for to_edge that rises to 1, where the largest eigenvalue is held by instability, or stands far above it, as at
    the beginning of a warm-up that is too short.

    Lanczos from the last row's vector: 5 products a row, the gradient's among them (21 at the first). A product costs
    about three forward-backward passes, and the graph of one stays in memory meanwhile.
    """

    undefined = frozenset({"residual"})

    def lacks(self, parameters: Parameters) -> str:
        inner = [unwrapped(optimizer) for optimizer in parameters.optimizers]
        if inner and not any(map(is_adam, inner)):
            kinds = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in inner))
            return f"needs an Adam or AdamW as optimizer=, not {kinds}: the probe sharpness is for any"
        return super().lacks(parameters)

    def scale(self, landscape: Landscape) -> Vector:
        optimizers = landscape.optimizers
        return adam_preconditioner(states(optimizers), landscape.trained(), groups_of(optimizers))

    def edge(self, landscape: Landscape) -> float:
        adams = [own for own in map(unwrapped, landscape.optimizers) if is_adam(own)]
        betas = {float(group["betas"][0]) for own in adams for group in own.param_groups}
        rate = landscape.rate
        if len(betas) != 1 or rate <= 0:
            return math.nan
        beta1 = betas.pop()
        return (2 + 2 * beta1) / ((1 - beta1) * rate)
