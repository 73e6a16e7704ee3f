"""The input of the down projection of stacked experts: a product that no module yields, caught at its
multiplication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .naming import unwrapped
from .sites import Site

MULTIPLY = ("linear", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "_grouped_mm", "grouped_mm")


def stacked(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights (E, ., .) of experts that one module holds itself; an empty list for fewer than two."""
    found = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    alike = len({parameter.shape[0] for parameter in found}) == 1 and "expert" in type(module).__name__.lower()
    return found if len(found) > 1 and alike else []


class Products(TorchFunctionMode):
    """Keeps the values that are multiplied with each of the weights of a module while the module runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weights = stacked(unwrapped(module))
        self._weights: dict[int, torch.Tensor] = {id(weight): weight for weight in weights}  # weights, parts, views
        self._first = {id(weight): id(weight) for weight in self._weights.values()}
        self.seen: list[tuple[int, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        weight = next((id(each) for each in given if id(each) in self._first), None)
        values = [each for each in given if id(each) not in self._first]
        if weight is not None and name in MULTIPLY and values:
            self.seen.append((self._first[weight], values[0]))
        elif weight is not None and isinstance(result, torch.Tensor):
            # a part or a view of the weight, or of low rank: the product of two weights, or a sum with that
            self._weights[id(result)] = result  # so that no other tensor gets its id
            self._first[id(result)] = self._first[weight]
        return result

    def last(self) -> torch.Tensor | None:
        """Return the values multiplied with the weight that is used last: (tokens in the order of experts, width)."""
        own = [value for weight, value in self.seen if weight == self.seen[-1][0]]
        return torch.cat([value.detach().flatten(0, -2) for value in own]) if own else None


@contextmanager
def products(sites: Sequence[Site]) -> Iterator[None]:
    """Fill each site that has ``take="inner"`` with the values that its module's last call multiplied, while the
    context lasts."""
    modes: dict[nn.Module, list[Products]] = {}
    inner = {site.module: site for site in sites if site.take == "inner"}

    def enter(module: nn.Module, args: Any) -> None:
        modes.setdefault(module, []).append(mode := Products(module))
        mode.__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mode = modes[module].pop()
        mode.__exit__(None, None, None)
        inner[module].caught[:] = [] if (value := mode.last()) is None else [value]

    handles = []
    try:
        for module in inner:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True, prepend=True))  # before probe hooks
        yield
    finally:
        for handle in handles:
            handle.remove()
        for site in inner.values():
            site.caught.clear()
