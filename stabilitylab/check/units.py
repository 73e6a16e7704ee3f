"""Units that are copies of each other: rows or columns of one matrix, equal up to sign and length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..probes.places.naming import modules_of, parameters_of
from .bounds import not_checked, weigh
from .result import Check

NAME = "duplicated units"
SAME = 1 - 1e-6  # |cosine| from which two units are one
NARROWEST = 8  # entries of a unit: fewer are alike by chance
AT_ONCE = 2048  # up to so many units of a matrix are all compared; of more units, only neighbours in order


def duplicated_units(model: nn.Module) -> Check:
    """Check the largest share of a matrix's units that have a copy, over all trainable weights. A convolution's kernels
    are flat rows; an embedding has only rows."""
    worst, share, largest, count = "", 0.0, 0.0, 0
    for name, matrix in _units(model):
        count += 1
        cosine, copies = _alike(matrix)
        largest = max(largest, cosine)
        if copies > share:
            worst, share = name, copies
    if not count:
        return not_checked(NAME, f"no trainable weight has units of {NARROWEST} entries or more")
    measured = f"the largest |cosine| between two units of a matrix is {largest:.2g}"
    if share:
        measured += f", and {share:.0%} of the units of {worst} are copies of another"
    return weigh(NAME, share, measured, site=worst)


def _units(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, units as rows) of each weight, by rows and by columns."""
    modules = modules_of(model)
    for name, parameter in parameters_of(model).items():
        home, _, own = name.rpartition(".")
        module = modules.get(home)
        gains = "Norm" in type(module).__name__  # gains start as ones
        if "weight" not in own or gains or parameter.dim() < 2 or not parameter.requires_grad:
            continue
        if hasattr(parameter, "placements"):
            continue
        weight = parameter.detach()
        rows = weight.flatten(1)
        if rows.shape[1] >= NARROWEST and len(rows) > 1:
            yield name, rows
        columns = weight.transpose(0, 1).flatten(1)
        embedding = isinstance(module, nn.Embedding)
        if columns.shape[1] >= NARROWEST and len(columns) > 1 and not embedding:
            yield f"{name} (columns)", columns


def _alike(units: Tensor) -> tuple[float, float]:
    """Return (largest |cosine| of two units, share of units with a copy among those that are not 0)."""
    units = units.double() if units.device.type == "cpu" else units.float()
    sizes = units.norm(dim=1)
    units = units[(sizes > 0) & sizes.isfinite()]
    if len(units) < 2:
        return 0.0, 0.0
    units = units / units.norm(dim=1, keepdim=True)
    if len(units) > AT_ONCE:
        return _in_order(units)
    cosines = (units @ units.T).abs().fill_diagonal_(0)
    most = cosines.max(dim=1).values
    return min(1.0, float(most.max())), float((most > SAME).double().mean())


def _in_order(units: Tensor) -> tuple[float, float]:
    """Return the same for many units: copies have one projection onto any direction, so they are neighbours in its
    order."""
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(units.shape[1], generator=draw, dtype=units.dtype).to(units.device)
    place = (units @ direction).abs().argsort()
    ordered = units[place]
    near = (ordered[1:] * ordered[:-1]).sum(dim=1).abs()
    alike = near > SAME
    has_copy = torch.zeros(len(units), dtype=torch.bool, device=units.device)
    has_copy[1:] |= alike
    has_copy[:-1] |= alike
    return min(1.0, float(near.max())), float(has_copy.double().mean())
