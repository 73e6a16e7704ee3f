"""A recorder for the CPU that keeps the promises of CUDA graphs: what is replayed is operators on the same memory.

While it records, every operator below autograd is written down with the tensors that it got and gave; a replay calls
them again on these, and no line of Python in between. What the recording computed is undone, as a graph's capture
computes nothing. Operators that make a GPU wait for its host, or read memory of the host, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

WAITS = (
    "aten::_local_scalar_dense",  # item(), bool(), float()
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::linalg_eigh",
    "aten::_linalg_eigh",
    "aten::lift_fresh",  # torch.tensor(numbers of the host)
    "aten::repeat_interleave.Tensor",
)


class Refused(RuntimeError):
    """A graph could not hold this operator."""


class _Writer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage -> (all of it, as it was)
        self.made: set[int] = set()  # storages that the recording itself allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in WAITS or str(func) in WAITS:
            raise Refused(f"{schema.name} in a recorded update")
        named = {declared.name: value for declared, value in zip(schema.arguments, args, strict=False)} | kwargs
        writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = [leaf for name in writes for leaf in tree_leaves(named.get(name)) if isinstance(leaf, torch.Tensor)]
        versions = [leaf._version for leaf in written]
        for leaf in written:
            self._keep(leaf)
        inputs = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **kwargs)
        if "foreach" in schema.name:  # on a CPU, below autograd, these alone do not count what they write
            for leaf, version in zip(written, versions, strict=True):
                if leaf._version == version and not leaf.is_inference():
                    torch.autograd.graph.increment_version(leaf)
        self.made |= {_storage(r) for r in tree_leaves(result) if isinstance(r, torch.Tensor)} - inputs
        self.calls.append((func, args, kwargs, result))
        return result

    def _keep(self, leaf: torch.Tensor) -> None:
        if (place := _storage(leaf)) not in self.made and place not in self.before:
            whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
            self.before[place] = whole, whole.clone()


class Tape:
    """Counts its recordings and replays."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, work: Callable[[], T]) -> T:
        self.warmed += 1
        return work()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        self.recorded += 1
        state, writer = torch.get_rng_state(), _Writer()
        try:
            with writer:
                result = work()
        finally:
            torch.set_rng_state(state)
            for whole, before in writer.before.values():
                whole.copy_(before)

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for func, args, kwargs, results in writer.calls:
                    _again(func, args, kwargs, results)

        return result, replay


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
    returns = func._schema.returns
    if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return  # a view: it looks at the memory that others fill
    new = func(*args, **kwargs)
    for old, fresh in zip(tree_leaves(results), tree_leaves(new), strict=True):
        if isinstance(old, torch.Tensor) and _storage(old) != _storage(fresh):
            old.detach().copy_(fresh)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
