"""Which modules route tokens to experts: told by their shape, beside the experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .structure import unwrapped


def routing(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Full names of the modules with a weight (E, width), and of the sibling, or cousin, of E experts that each has."""
    for path, module in modules.items():
        weight = getattr(unwrapped(module), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and path:
            home = path.rpartition(".")[0]
            homes = {home, home.rpartition(".")[0]} if _is_router(home, modules) else {home}
            beside = {name: other for name, other in modules.items() if name and name.rpartition(".")[0] in homes}
            own = (name for name, other in beside.items() if other is not module)
            if (
                found := next((name for name in own if experts(beside[name]) == weight.shape[0] > 1), None)
            ) is not None:
                yield path, found


def _is_router(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it calls itself so: a module that holds the projection of a router."""
    name = type(modules[path]).__name__.lower() if path in modules else ""
    return any(word in name for word in ("router", "gate"))


def experts(module: nn.Module) -> int:
    """How many experts a module holds: the children of a list of them, or the first dimension of stacked weights; 0
    for one that holds none."""
    inner = unwrapped(module)
    if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
        children = list(inner.children())
        alike = len({type(child) for child in children}) == 1
        return len(children) if alike and all(next(child.parameters(), None) is not None for child in children) else 0
    if "expert" not in type(inner).__name__.lower():
        return 0
    stacked = {parameter.shape[0] for parameter in inner.parameters(recurse=False) if parameter.dim() == 3}
    if len(stacked) == 1:
        return stacked.pop()
    return next((count for child in inner.children() if (count := experts(child))), 0)
