"""Modules that route tokens to experts: found by the shape of their weight, and by their names or the experts'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from .naming import GENERIC, kept_tensor, unwrapped

EXPERTS = ("expert", "moe", "mixture")  # in names of classes and of children
ROUTERS = ("router", "routing", "gate", "gating", "switch")
LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)


def routing(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield pairs of full names: a module with a weight (E, width), and the E experts beside it, or beside its parent
    if that is called a router.

    The shape is not enough: a classifier of n classes beside a list of n layers has it too. The module must be called a
    router, or the others experts.
    """
    children: dict[str, list[str]] = {}
    for path in modules:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    for path, module in modules.items():
        weight = kept_tensor(unwrapped(module), "weight")
        if weight is None or weight.dim() != 2 or not path or isinstance(unwrapped(module), LOOKED_UP):
            continue
        home = path.rpartition(".")[0]
        homes = [home]
        if home and _says(ROUTERS, type(modules[home]).__name__):
            homes.append(home.rpartition(".")[0])
        routes = _says(ROUTERS, path.rpartition(".")[2], type(unwrapped(module)).__name__) or len(homes) > 1
        for name in (name for each in homes for name in children.get(each, ()) if modules[name] is not module):
            if experts(modules[name]) == weight.shape[0] > 1 and _are_experts(name, modules, routes):
                yield path, name
                break


def _are_experts(path: str, modules: Mapping[str, nn.Module], routed: bool) -> bool:
    """Return True for one module of stacked experts, and for a list that is called experts. Return True also for a list
    beside a router (``routed``), unless the list has a common name of lists of layers."""
    inner, last = unwrapped(modules[path]), path.rpartition(".")[2]
    if not isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
        return True
    child = next(iter(inner.children()))
    if _says(EXPERTS, type(unwrapped(child)).__name__, type(inner).__name__):
        return True
    return last not in GENERIC and (routed or _says(EXPERTS, last, type(modules[path.rpartition(".")[0]]).__name__))


def _says(words: tuple[str, ...], *names: str) -> bool:
    return any(word in name.lower() for word in words for name in names)


def experts(module: nn.Module) -> int:
    """Return the number of experts that a module holds: the children of a list of experts, or the first dimension of
    stacked weights; 0 for a module without experts."""
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
