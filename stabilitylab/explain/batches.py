"""Batches on the host: copies of nested dictionaries, lists and tuples of tensors, and their way back to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError

PLAIN = (type(None), bool, int, float, str)


def kept(batch: Any) -> dict[str, Any]:
    """Return a copy of ``batch`` that a file may hold: ``content`` with all tensors on the host, and ``moved``, True
    for each tensor, in order, that lay on another device.

    A mapping becomes a dict. Raises UsageError for anything but tensors, numbers and text in dictionaries, lists and
    tuples.
    """
    moved: list[bool] = []

    def copy(tensor: Tensor) -> Tensor:
        moved.append(tensor.device.type != "cpu")
        return tensor.detach().to("cpu", copy=True)

    return {"content": _mapped(batch, copy, "batch"), "moved": moved}


def restored(batch: Mapping[str, Any], device: torch.device) -> Any:
    """Return a fresh copy of the batch in ``kept``, with the tensors that were on an accelerator on ``device``."""
    moved = iter(batch["moved"])

    def back(tensor: Tensor) -> Tensor:
        return tensor.to(device) if next(moved) and device.type != "cpu" else tensor.clone()

    return _mapped(batch["content"], back, "batch")


def changed(batch: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Return a kept batch with each tensor as ``change`` returns it, given the tensor's name (``labels``,
    ``0.labels``; "" for a batch that is one tensor) and the tensor."""
    return {**batch, "content": _named(batch["content"], change, "")}


def tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a kept batch by name."""
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    changed(batch, note)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Tensor], name: str) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(key): _mapped(each, change, f"{name}[{key!r}]") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change, f"{name}[{number}]") for number, each in enumerate(value))
    raise UsageError(
        f"{name} is {type(value).__name__}, which a recorder cannot keep: give w.batch() tensors in dictionaries, "
        "lists or tuples."
    )


def _named(value: Any, change: Callable[[str, Tensor], Tensor], name: str) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, dict):
        return {key: _named(each, change, f"{name}.{key}".lstrip(".")) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_named(each, change, f"{name}.{n}".lstrip(".")) for n, each in enumerate(value))
    return value
