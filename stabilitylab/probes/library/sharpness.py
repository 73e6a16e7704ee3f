"""The curvature of the loss without a preconditioner, which gradient descent's edge of stability is about."""

from __future__ import annotations

from ..base import probe
from ..rules import Mean
from .preconditioned_sharpness import UNIT, OfTheHessian

COLUMNS = ("value", "along_gradient", "residual", "converged", "products", "exact")


@probe(
    "sharpness",
    on="curvature",
    unit={column: UNIT[column] for column in COLUMNS},
    columns={column: Mean() for column in COLUMNS},
    log=True,
)
class Sharpness(OfTheHessian):
    """value: largest eigenvalue of the Hessian of a fixed batch's loss at theta_t; along_gradient: g'Hg / g'g.
    Full-batch gradient descent is unstable from 2 / lr on (Cohen et al. 2021, 2103.00065). residual: how far the value
    may be off, relative; converged: 1 where that is 5 % or less: no other row decides anything. exact: 1 for products
    by a second differentiation, 0 for central differences of gradients.

    Look for a growth that no learning rate explains. It is not preconditioned_sharpness, from which it differs by
    orders of magnitude near initialisation, and has no meaning for Adam's stability.

    Cost: as preconditioned_sharpness.
    """

    undefined = frozenset({"residual"})
