"""The linear of a feed-forward block that leads back to the model's width: widths decide, or names if widths are
equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from .naming import kept_tensor

NUMBERED = {"w1", "w2", "w3"}  # LLaMA's names: w2(act(w1(x)) * w3(x))


class WayBack(NamedTuple):
    """The linear that leads back from the inner width; ``product``: its input is a product of two projections."""

    name: str
    module: nn.Module
    product: bool

    @property
    def widening(self) -> int:
        """The inner width less the outer width: below 0 for a pair of low rank."""
        inner, outer = widths(self.module) or (0, 0)
        return inner - outer


def widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the input and output width of a linear, or of a module that holds the weights of all experts, (E, out,
    in); None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if "expert" not in type(module).__name__.lower():
        return None
    weight = kept_tensor(module, "weight")
    if isinstance(weight, nn.Parameter) and weight.dim() == 3:
        return weight.shape[2], weight.shape[1]
    return None


def way_back(linears: Sequence[tuple[str, nn.Module]]) -> WayBack | None:
    """Return the first linear that leads from the inner width of a block back to the width that an earlier linear took.

    Its input is a product if twice as many linears lead to the inner width as lead back (a gate and a value, in any
    order of registration), or if one linear leads to twice the inner width. If all linears are square the names decide.
    Numbers in the names count before the order of registration.
    """
    known = [(name, module, shape) for name, module in _in_order(linears) if (shape := widths(module)) is not None]
    shapes = [shape for *_, shape in known]
    if len(known) > 2 and len({size for shape in shapes for size in shape}) == 1 and (named := _named(linears)):
        return named
    for name, module, (inner, outer) in known:
        if inner != outer and shapes.count((outer, inner)) == 2 * shapes.count((inner, outer)):
            return WayBack(name, module, True)
    for at, (name, module, (inner, outer)) in enumerate(known):
        ways = [leaving for entering, leaving in shapes[:at] if entering == outer]
        fused = 2 * inner in ways and inner > outer
        if inner in ways or fused:
            ahead, back = shapes.count((outer, inner)), shapes.count((inner, outer))
            return WayBack(name, module, inner not in ways or (inner != outer and ahead >= 2 * back))
    return None


def _in_order(linears: Sequence[tuple[str, nn.Module]]) -> Sequence[tuple[str, nn.Module]]:
    """Return the linears by the numbers that end their names (fc1, fc2), if the names differ in nothing else."""
    stems = {name.rstrip("0123456789") for name, _ in linears}
    if len(stems) > 1 or any(name[-1:] not in set("0123456789") for name, _ in linears):
        return linears
    return sorted(linears, key=lambda each: int(each[0].removeprefix(next(iter(stems)))))


def _named(linears: Sequence[tuple[str, nn.Module]]) -> WayBack | None:
    """Return the way back of a gated block of square linears, if their names tell it; else None."""
    lasts = {name.rpartition(".")[2].lower(): (name, module) for name, module in linears}
    if lasts.keys() >= NUMBERED:
        return WayBack(*lasts["w2"], True)
    down = next((last for last in lasts if "down" in last or "out" in last), None)
    return WayBack(*lasts[down], True) if down and any("gate" in last for last in lasts) else None
