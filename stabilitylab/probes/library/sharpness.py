"""The curvature of the loss without a preconditioner, which decides where gradient descent becomes unstable."""

from __future__ import annotations

from ..base import probe
from ..rules import Mean
from .preconditioned_sharpness import UNITS, OfTheHessian

OWN_UNITS = {column: unit for column, unit in UNITS.items() if column != "to_edge"}  # which is Adam's


@probe("sharpness", on="curvature", unit=OWN_UNITS, columns=dict.fromkeys(OWN_UNITS, Mean()), log=True)
class Sharpness(OfTheHessian):
    """The largest curvature of a fixed batch's loss at theta_t. ``value``: the largest eigenvalue of the Hessian H.
    Full-batch gradient descent is unstable if it exceeds 2 / lr (Cohen et al. 2021, 2103.00065). ``along_gradient``:
    g'Hg / g'g. ``residual``: the relative error that the value may have. ``converged``: 1 if the residual is 5 % or
    less; rows with 0 decide nothing. ``products``: the number of Hessian-vector products of the row. ``exact``: 1 for
    products by a second differentiation, 0 for central differences of gradients.

    Look for a growth that the learning rate does not explain. This number is not preconditioned_sharpness: near
    initialisation the two differ by orders of magnitude. It says nothing about the stability of Adam.

    Cost: the cost of preconditioned_sharpness.
    """

    undefined = frozenset({"residual"})
