"""Copies of a model's arguments, whatever objects they are in: lists and dictionaries, named tuples, dataclasses,
objects of batches such as transformers' BatchEncoding and torch_geometric's Data."""

from __future__ import annotations

import copy
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..state import PLAIN

SHARED = (*PLAIN, range, slice, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)
MOST = 10_000  # objects that are looked into


class NotCopied(Exception):
    """An error for something in a batch that cannot be copied; the message names it."""


def each_tensor(change: Callable[[Tensor], Tensor], **named: Any) -> tuple[Any, ...]:
    """Return a copy of each of ``named``, with every tensor replaced by ``change(tensor)``.

    Containers, arrays, random generators and objects with attributes are copied; plain values, functions and modules
    are shared. Raises NotCopied, which names the place, for an object that holds a tensor and cannot be copied, for an
    argument whose content cannot be read, and for an iterator, which the first pass would use up.
    """
    copier = _Copy(change)
    return tuple(copier.of(value, name) for name, value in named.items())


def tensors(value: Any) -> list[Tensor] | None:
    """The tensors in nested lists, tuples and dictionaries; None where anything else may hold one."""
    leaves = pytree.tree_leaves(value)
    if any(not isinstance(leaf, (Tensor, *SHARED)) for leaf in leaves):
        return None
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _Copy:
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self._change = change
        self._known: dict[int, tuple[Any, Any]] = {}  # id -> the object, so that it lives, and its copy

    def of(self, value: Any, name: str, inside: bool = False) -> Any:
        """Return the copy of a value. ``inside``: True for an attribute of an object, which may be of any kind if
        it holds no tensor."""
        if isinstance(value, SHARED):
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        if len(self._known) > MOST:
            raise NotCopied(f"{name}, which holds more than {MOST} objects")
        made = self._made(value, name, inside)
        self._known[id(value)] = value, made
        return made

    def _made(self, value: Any, name: str, inside: bool) -> Any:
        if isinstance(value, Tensor):
            return self._change(value)
        if isinstance(value, Iterator):
            raise NotCopied(f"{name}, a {type(value).__name__}, which the first pass would use up")
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
            return _same_stream(value)
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self._known[id(target)][1]) if id(target) in self._known else value
        if type(value) in (list, deque, set, frozenset):
            return type(value)(self._each(value, name, inside))
        if isinstance(value, tuple):
            items = self._each(value, name, inside)
            return tuple(items) if type(value) is tuple else tuple.__new__(type(value), items)
        if type(value) is dict:
            return {key: self.of(each, f"{name}[{key!r}]", inside) for key, each in value.items()}
        return self._object(value, name, inside)

    def _each(self, values: Any, name: str, inside: bool) -> Iterator[Any]:
        return (self.of(each, f"{name}[{number}]", inside) for number, each in enumerate(values))

    def _object(self, value: Any, name: str, inside: bool) -> Any:
        attributes = _attributes(value)
        entries = _entries(value)
        if attributes is None and entries is None:
            if inside:
                return value
            raise NotCopied(f"{name}, a {type(value).__name__}, into which nothing can look")
        try:
            made = copy.copy(value)
        except Exception:  # whatever its class does
            made = None
        self._known[id(value)] = value, made
        given = {f".{key}": each for key, each in (attributes or {}).items()}
        given |= {f"[{key!r}]": each for key, each in (entries or {}).items()}
        new = {key: self.of(each, f"{name}{key}", inside=True) for key, each in given.items()}
        changed = {key for key, each in new.items() if each is not given[key]}
        if not changed:
            return value if made is None or not given else made
        try:
            assert made is not None, "it cannot be copied"
            for key in attributes or {}:
                if f".{key}" in changed:
                    _set(made, key, new[f".{key}"])
            for key in entries or {}:
                if f"[{key!r}]" in changed:
                    made[key] = new[f"[{key!r}]"]
        except Exception as error:
            raise NotCopied(f"{name}, a {type(value).__name__}") from error
        return made


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object; None if it has neither ``__dict__`` nor slots."""
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind)]
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) and not slots:
        return None
    return {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | dict(own or {})


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _entries(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a subclass of a dictionary, list or deque; None for other objects."""
    if isinstance(value, dict):
        return dict(value.items())
    return dict(enumerate(value)) if isinstance(value, (list, deque)) else None


def _set(made: Any, name: str, value: Any) -> None:
    """Set an attribute, also of a frozen class or one with a property of that name."""
    if isinstance(own := getattr(made, "__dict__", None), dict) and name in own:
        own[name] = value
    else:
        object.__setattr__(made, name, value)


def _same_stream(generator: Any) -> Any:
    if not isinstance(generator, torch.Generator):
        return copy.deepcopy(generator)
    made = torch.Generator(generator.device)
    made.set_state(generator.get_state())
    return made
