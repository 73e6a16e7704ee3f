"""The state that a forward pass can write: a model's tensors, and the dictionaries and lists that hold them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..places.naming import named

Kind = Literal["parameter", "buffer", "attribute"]
Random = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum, np.generic)
OURS = "_stabilitylab"  # beginning of the names of attributes that this package sets
BOOKKEEPING = frozenset(vars(nn.Module()))  # attributes that torch keeps in a module: registries, hooks, flags
LARGEST = 10_000  # most entries of a list or dictionary that is looked into
DEEPEST = 4  # deepest nesting of lists and dictionaries that is looked into
FOREIGN = {"torch", "builtins", "functools", "logging", "threading", "_thread", "weakref", "numpy", "random"}
ABSENT = object()


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of the model under its name. ``kind``: a parameter or buffer of a registered module. An attribute is
    anything else, also a parameter of a module that is hidden in a list."""

    name: str
    kind: Kind
    tensor: Tensor


@dataclass(frozen=True)
class Holder:
    """A dictionary or list that holds state. ``has_attributes``: the dictionary has the attributes of an object, and is
    no value itself."""

    name: str
    kind: Kind
    container: Any
    has_attributes: bool = False

    def entries(self) -> dict[Any, Any]:
        """Return a shallow copy of the entries: by key, or by place in a list. Attributes of torch and of this package
        are left out."""
        if not isinstance(self.container, Mapping):
            return dict(enumerate(self.container))
        items = self.container.items()
        return {key: value for key, value in items if not (self.has_attributes and is_bookkeeping(key))}

    def put_back(self, before: Mapping[Any, Any]) -> list[tuple[Any, Any, Any]]:
        """Bind again what :meth:`entries` returned ``before``; return (key, old, new) of each entry that had changed.

        An entry that was or became another object (a cache, a function, a handle) stays as it is. A list with such an
        entry stays as it is too.
        """
        now = self.entries()
        pairs = [(key, before.get(key, ABSENT), now.get(key, ABSENT)) for key in dict.fromkeys([*before, *now])]
        differing = [(key, old, new) for key, old, new in pairs if not (_alike(old, new) or _reshards(old, new))]
        changed = [(key, old, new) for key, old, new in differing if is_state(old) and is_state(new)]
        if isinstance(self.container, MutableMapping):
            for key, old, _ in changed:
                if old is ABSENT:
                    del self.container[key]
                else:
                    self.container[key] = old
        elif len(changed) < len(differing):
            return []
        elif changed:
            self.container.clear()
            self.container.extend(before.values())
        return changed

    def named(self, key: Any) -> str:
        """Return the name of an entry, such as ``encoder.queue`` or ``memory[0]``."""
        if not self.has_attributes:
            return f"{self.name}[{key!r}]"
        return f"{self.name}.{key}" if self.name else str(key)


@dataclass
class Survey:
    """All state that was found in a model, each object once. ``unseen``: names of containers that were not looked into,
    as they are too large or nested too deep."""

    tensors: list[HeldTensor] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    generators: list[tuple[str, Random]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def survey(model: nn.Module) -> Survey:
    """Find the state of ``model``: parameters, buffers (those outside the state dict too) and attributes of modules.

    Attributes include tensors and arrays; lists, dictionaries and tuples of them; modules that no module registers (a
    momentum encoder hidden in a list); random generators; objects that hold a tensor themselves. Objects of torch's own
    classes are left out.
    """
    walk = _Walk()
    walk.module("", model, registered=True)
    return walk.found


def is_bookkeeping(key: Any) -> bool:
    """True for an attribute of a module that torch or this package keeps there."""
    return key in BOOKKEEPING or (isinstance(key, str) and key.startswith(OURS))


def numbers_of(model: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Return the attributes of registered modules that are numbers: name, the dictionary that holds it, and its key."""
    return [
        (f"{each.path}.{key}".lstrip("."), vars(each.module), key)
        for each in named(model)
        for key, value in vars(each.module).items()
        if isinstance(value, int | float) and key != "training" and not is_bookkeeping(key)
    ]


def is_state(value: Any) -> bool:
    """True for a value that can be put back: an absent or plain value, a tensor, an array, or a list, dictionary, tuple
    or set."""
    return value is ABSENT or isinstance(value, (*PLAIN, Tensor, np.ndarray, list, dict, tuple, set, frozenset, deque))


def _reshards(old: Any, new: Any) -> bool:
    """True for a shard and the whole tensor, which fully_shard exchanges as it likes."""
    return isinstance(old, Tensor) and isinstance(new, Tensor) and hasattr(old, "to_local") != hasattr(new, "to_local")


def _alike(old: Any, new: Any) -> bool:
    """True if both are one object, or equal plain values."""
    if old is new:
        return True
    if isinstance(old, tuple) and all(isinstance(each, PLAIN) for each in old):
        return type(old) is type(new) and old == new
    return isinstance(old, PLAIN) and type(old) is type(new) and bool(old == new)


class _Walk:
    def __init__(self) -> None:
        self.found = Survey()
        self._seen: set[int] = set()

    def module(self, name: str, root: nn.Module, registered: bool) -> None:
        new = [each for each in named(root) if not self._known(each.module)]
        modules = [(".".join(filter(None, (name, each.path))), each.module) for each in new]
        for full, module in modules:  # registries come first: attributes may hold the same tensors in lists
            for registry in ("parameters", "buffers"):
                own: Any = vars(module).get(f"_{registry}")
                if type(own) is not dict:  # a ScriptModule
                    own = dict(getattr(module, f"named_{registry}")(recurse=False))
                kind: Any = registry[:-1] if registered else "attribute"
                self._enter_all(Holder(full, kind, own, has_attributes=True), 0)
        for full, module in modules:
            self._enter_all(Holder(full, "attribute", vars(module), has_attributes=True), 0)

    def _known(self, value: Any) -> bool:
        known = id(value) in self._seen
        self._seen.add(id(value))
        return known

    def _enter(self, name: str, kind: Kind, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.module(name, value, registered=False)
            return
        if isinstance(value, PLAIN) or self._known(value):
            return
        if isinstance(value, Tensor):
            self.found.tensors.append(HeldTensor(name, kind, value))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.dtype.kind in "biufc" and min((0, *value.strides)) >= 0:
                self.found.tensors.append(HeldTensor(name, kind, torch.from_numpy(value)))
        elif isinstance(value, (dict, list, tuple, deque)):
            self._enter_all(Holder(name, kind, value), depth)
        elif isinstance(value, (set, frozenset)):
            self._enter_all(Holder(name, kind, tuple(value)), depth)
        elif isinstance(value, Random):
            self.found.generators.append((name, value))
        elif holds_tensors(value):
            self._enter_all(Holder(name, kind, vars(value), has_attributes=True), depth)

    def _enter_all(self, holder: Holder, depth: int) -> None:
        if len(holder.container) > LARGEST or depth > DEEPEST:
            self.found.unseen.append(holder.name)
            return
        if not isinstance(holder.container, tuple):
            self.found.holders.append(holder)
        for key, value in holder.entries().items():
            self._enter(holder.named(key), holder.kind, value, depth + 1)


def holds_tensors(value: Any) -> bool:
    """True for an object with an attribute that is a tensor, or a list or dictionary with a tensor, if its class is not
    torch's, numpy's or Python's own."""
    if type(value).__module__.partition(".")[0] in FOREIGN or isinstance(value, type):
        return False
    own = getattr(value, "__dict__", None)
    return type(own) is dict and any(_is_tensor_or_list(each) for each in own.values())


def _is_tensor_or_list(value: Any) -> bool:
    return isinstance(value, Tensor) or any(isinstance(each, Tensor) for each in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) and len(value) <= LARGEST:
        yield from value.values()
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) <= LARGEST:
        yield from value
