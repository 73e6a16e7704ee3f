"""Curvature of the loss around a model's parameters. These numbers need a loss, and no sites of probes."""

from .critical import Critical, critical_rate, crossing
from .eigen import Eigen, largest_eigenvalue
from .hessian_products import HessianProducts, adam_preconditioner, relative_rates

__all__ = [
    "Critical",
    "Eigen",
    "HessianProducts",
    "adam_preconditioner",
    "critical_rate",
    "crossing",
    "largest_eigenvalue",
    "relative_rates",
]
