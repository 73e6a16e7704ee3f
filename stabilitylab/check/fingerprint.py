"""A digest of everything that an update leaves behind: of model, optimizers, losses and random states."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..probes.state import PLAIN, packed, spans, state_of, survey

Print = dict[str, str]  # name -> digest; names begin with their kind


def fingerprint(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], returned: Sequence[Any]) -> Print:
    """Return name -> digest of losses (``returned``), parameters, buffers and attributes of modules, gradients, state
    and settings of ``optimizers``, and random states, in this order."""
    found: Print = {}
    for number, value in enumerate(returned):
        found |= _of(f"loss {number}" if number else "loss", value)
    known = survey(model)
    for held in sorted(known.tensors, key=lambda held: ("parameter", "buffer", "attribute").index(held.kind)):
        found |= _of(f"{held.kind} {held.name}", held.tensor)
    for holder in known.holders:
        for key, value in holder.entries().items():
            if isinstance(value, PLAIN):
                found |= _of(f"value {holder.named(key)}", value)
    for name, generator in known.generators:
        found[f"generator {name}"] = _digest(_exactly(state_of(generator)))
    named = [(held.name, held.tensor) for held in known.tensors if held.kind == "parameter"]
    for name, parameter in named:
        found |= _of(f"gradient {name}", parameter.grad)
    names = {id(parameter): name for name, parameter in named}
    for number, optimizer in enumerate(optimizers):
        found |= _of_optimizer(f"optimizer {number}", optimizer, names)
    return found | random_states()


def kinds(found: Print) -> dict[str, int]:
    """Count the entries of a fingerprint by their kind."""
    return dict(Counter(name.partition(" ")[0] for name in found))


def random_states() -> Print:
    """Return the digests of the random states of Python, numpy and torch, on every GPU that was used."""
    states = {"Python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return {f"random-state {name}": _digest(_exactly(state)) for name, state in states.items()}


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Print:
    found: Print = {}
    for at, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found |= _of(f"{name} group {at} {key}", value)
        for place, parameter in enumerate(group["params"]):
            whose = names.get(id(parameter), f"parameter {place} of group {at}")
            for key, value in optimizer.state.get(parameter, {}).items():
                found |= _of(f"{name} {key} of {whose}", value)
    return found


def _of(name: str, value: Any) -> Print:
    """Return the digest of a value, or of the values inside a list, tuple or dictionary."""
    if isinstance(value, Tensor):
        parts = spans(value)
        if parts is None:
            return {}
        head = f"{value.dtype} {tuple(value.shape)} {value.layout}".encode()
        return {name: _digest(head, *(packed(part).cpu().numpy().tobytes() for part, _ in parts))}
    if isinstance(value, np.ndarray):
        return {name: _digest(str(value.dtype).encode(), value.tobytes())}
    if isinstance(value, PLAIN):
        return {name: _digest(f"{type(value).__name__} {value!r}".encode())}
    if isinstance(value, Mapping):
        value = dict(value).items()
    elif isinstance(value, (list, tuple)):
        value = enumerate(value)
    else:
        return {}
    return {key: digest for at, each in value for key, digest in _of(f"{name} {at}", each).items()}


def _exactly(state: Any) -> bytes:
    """Return all bytes of a state of nested tuples, numbers and arrays: repr() shortens arrays."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, (tuple, list)):
        return b"(" + b",".join(map(_exactly, state)) + b")"
    if isinstance(state, Mapping):
        return b"{" + b",".join(_exactly(item) for item in sorted(state.items())) + b"}"
    if isinstance(state, Tensor):
        return packed(state).cpu().numpy().tobytes()
    return repr(state).encode()


def _digest(*parts: bytes) -> str:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.hexdigest()
