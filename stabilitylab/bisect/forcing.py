"""Teacher forcing: each module of the second model gets the input of the same module of the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..probes.places.naming import modules_of
from ..probes.places.sites import hidden_state, tensor_of
from .model_pass import LossFunction, comparable, loss_of


@dataclass
class Values:
    """The inputs and outputs of modules in one forward pass, on the host, by place (NAME:in, NAME:out)."""

    held: dict[str, Tensor] = field(default_factory=dict)


def values_of(model: nn.Module, batch: Any, loss_fn: LossFunction, places: Sequence[str], seed: int = 0) -> Values:
    """Return the values at ``places`` (NAME:in, NAME:out) in one forward pass, in evaluation mode and with the random
    states of ``seed``."""
    kept = Values()
    with comparable(model, seed), _watched(model, places, kept, {}):
        loss_of(model, batch, loss_fn)
    return kept


def forced(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    places: Mapping[str, str],
    given: Values,
    seed: int = 0,
) -> dict[str, float]:
    """Return the relative error of each place if every module gets the input that it had in the first model.

    ``places``: names in the first model -> names in this one. At an input, the error is that of the value before it is
    replaced: it arises outside of modules that are places, from values that the replaced ones return. NaN if this
    model's value has another shape.
    """
    inputs = {other: given.held[own] for own, other in places.items() if own.endswith(":in") and own in given.held}
    kept = Values()
    with comparable(model, seed), _watched(model, list(places.values()), kept, inputs):
        loss_of(model, batch, loss_fn)
    return {
        own: _relative(given.held[own], kept.held[other])
        for own, other in places.items()
        if own in given.held and other in kept.held
    }


def _relative(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.nan
    size = torch.linalg.vector_norm(a, dtype=torch.float64)
    apart = torch.linalg.vector_norm(a.double() - b.double())
    if float(apart) == 0:
        return 0.0
    relative = float(apart / size)
    return relative if math.isfinite(relative) else math.inf


@contextmanager
def _watched(model: nn.Module, places: Sequence[str], kept: Values, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Keep the values of the first call of each module, and replace what enters by ``inputs``."""
    modules, wanted = modules_of(model), set(places)
    handles: list[Any] = []

    def enters(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            value = hidden_state(args, kwargs)
            if value is None or name in kept.held:
                return None
            kept.held[name] = value.detach().to("cpu", copy=True)
            new = inputs.get(name)
            if new is None or new.shape != value.shape:
                return None
            fitting = new.to(value.device, value.dtype)
            return _with(args, value, fitting), _with(kwargs, value, fitting)

        return hook

    def leaves(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = tensor_of(output)
            if value is not None and name not in kept.held:
                kept.held[name] = value.detach().to("cpu", copy=True)

        return hook

    try:
        for path, module in modules.items():
            if f"{path}:in" in wanted:
                handles.append(module.register_forward_pre_hook(enters(f"{path}:in"), with_kwargs=True))
            if f"{path}:out" in wanted:
                handles.append(module.register_forward_hook(leaves(f"{path}:out")))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with(given: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments with another tensor in one's place."""
    if given is old:
        return new
    if type(given) in (tuple, list):
        return type(given)(_with(item, old, new) for item in given)
    return {key: _with(item, old, new) for key, item in given.items()} if type(given) is dict else given
