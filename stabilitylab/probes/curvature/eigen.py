"""The largest eigenvalue of a symmetric operator from a few products with it, warm-started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .hessian_products import Vector, dot

TOLERANCE = 0.01  # share of the eigenvalue; the residual bounds its error: |lambda - value| <= residual
VANISHES = 1e-10  # share of the operator's size below which the Krylov space of the start is exhausted


@dataclass(frozen=True)
class Eigen:
    """The largest Ritz value of a Krylov space, and its error bound: some eigenvalue lies within ``residual`` of
    ``value``.

    ``converged``: the residual is at most the tolerance times the value. ``vector``: of unit length, the start of the
    next search.
    """

    value: float
    residual: float
    products: int
    converged: bool
    vector: Vector = field(repr=False)


def largest_eigenvalue(
    product: Callable[[Vector], Vector],
    start: Sequence[Tensor],
    *,
    products: int = 5,
    tolerance: float = TOLERANCE,
    inner: Callable[[Sequence[Tensor], Sequence[Tensor]], float] = dot,
) -> Eigen:
    """Find the algebraically largest eigenvalue of a symmetric ``product`` by Lanczos' method, from ``start``.

    Every vector is made orthogonal to all vectors before it, twice, so that rounding makes no copies of an eigenvalue.
    The memory is one vector of the model's size per product. The search ends early if the residual is small enough. A
    start that is orthogonal to the wanted eigenvector finds another one: give a random vector, or that of the last
    search. ``inner``: the inner product, if a vector is spread over ranks. Raises ValueError for a start of length 0 or
    of no finite length.
    """
    size = math.sqrt(inner(start, start))
    if not (size > 0 and math.isfinite(size)):
        raise ValueError("the start of a search for an eigenvector has no length: give a random direction.")
    basis: list[Vector] = [[v / size for v in start]]
    diagonal: list[float] = []
    beside: list[float] = []
    value, weights, residual = math.nan, np.ones(1), math.inf
    for used in range(1, max(1, products) + 1):
        found = product(basis[-1])
        diagonal.append(inner(found, basis[-1]))
        for _ in range(2):
            for one in basis:
                share = inner(found, one)
                found = [f - share * v for f, v in zip(found, one, strict=True)]
        left = math.sqrt(inner(found, found))
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        if not np.isfinite(matrix).all():
            return Eigen(math.nan, math.inf, used, False, basis[0])
        values, vectors = np.linalg.eigh(matrix)
        value, weights = float(values[-1]), vectors[:, -1]
        residual = abs(left * float(weights[-1]))
        scale = max(abs(values[0]), abs(values[-1]))
        if residual <= tolerance * abs(value) or left <= VANISHES * scale or used >= products:
            break
        beside.append(left)
        basis.append([f / left for f in found])
    vector = [
        torch.stack([float(w) * v for w, v in zip(weights, each, strict=False)]).sum(0)
        for each in zip(*basis, strict=True)
    ]
    return Eigen(value, residual, len(diagonal), residual <= tolerance * abs(value), vector)
