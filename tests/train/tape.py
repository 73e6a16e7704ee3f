"""A recorder for the CPU that keeps the promises of CUDA graphs: what is replayed is operators on the same memory.

While it records, every operator below autograd is written down with the tensors that it got and gave; a replay calls
them again on these, and no line of Python in between. What the recording computed is undone, as a graph's capture
computes nothing. Graphs share a pool of memory: a replay first spoils what its own recording and the later ones
allocated, which may lie where this one works. Operators that make a GPU wait for its host, or read memory of the
host, are refused, and random states that are kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabilitylab.probes._engine import hooks

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


_INSIDE = {"visit": hooks._run, "through": lambda value, key: value.clone()}


class Refused(RuntimeError):
    """A graph could not hold this operator."""


class _Writer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage -> (all of it, as it was)
        self.made: dict[int, torch.Tensor] = {}  # storages that the recording itself allocated

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as it is, and is written down too

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "stabilitylab":  # what a probe in compiled code calls; a graph has but the kernels inside
            with self:
                return _INSIDE[func._opname](*args, **kwargs)
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
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.made |= {_storage(r): _whole(r) for r in results if _storage(r) not in inputs | self.made.keys()}
        self.calls.append((func, args, kwargs, result))
        return result

    def _keep(self, leaf: torch.Tensor) -> None:
        if (place := _storage(leaf)) not in self.made and place not in self.before:
            self.before[place] = _whole(leaf), _whole(leaf).clone()


class Tape:
    """Counts its recordings and replays."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0
        self._pool: list[dict[int, torch.Tensor]] = []

    def warm_up(self, work: Callable[[], T]) -> T:
        self.warmed += 1
        return work()

    def another(self) -> Tape:
        return self

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        self.recorded += 1
        state, writer = torch.get_rng_state(), _Writer()
        try:
            with writer, mock.patch.object(torch.random, "fork_rng", _forked):
                result = work()
        finally:
            torch.set_rng_state(state)
            for whole, before in writer.before.values():
                whole.copy_(before)

        place = len(self._pool)
        self._pool.append(writer.made)

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                for made in self._pool[place:]:
                    for whole in made.values():
                        whole.fill_(0xFF)  # NaN; and no index of anything
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


def _forked(*given: Any, enabled: bool = True, **more: Any) -> Any:
    """A GPU's generator cannot be read or set within a capture."""
    if enabled:
        raise Refused("a random state is kept in a recorded update")
    return nullcontext()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
