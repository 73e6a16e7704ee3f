"""The state of a training between two updates: captured on the host, and put back bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..probes.places.naming import named, parameters_of
from ..probes.state import numbers_of, random_states, set_random_states, survey

State = dict[str, Any]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def captured(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: Any = None, scheduler: Any = None
) -> State:
    """Return a copy, on the host, of everything that the next update depends on.

    ``tensors``: parameters, buffers and tensors among the attributes of modules, by name; ``attributes``: the names of
    the last; ``training`` of modules and ``requires_grad`` of parameters; ``numbers``: attributes of modules;
    ``optimizers``, ``scaler``, ``scheduler``; ``random``: the generators of Python, numpy and torch, on all devices
    that are in use; ``generators``: those of torch that the model holds itself.
    """
    found = survey(model).tensors
    return {
        "tensors": {held.name: _copy(held.tensor) for held in found},
        "attributes": [held.name for held in found if held.kind == "attribute"],
        "training": {path: module.training for path, module in _modules(model)},
        "requires_grad": {name: p.requires_grad for name, p in parameters_of(model).items()},
        "numbers": {name: holder[key] for name, holder, key in numbers_of(model)},
        "optimizers": [optimizer_state(one, parameters_of(model)) for one in optimizers],
        "scaler": None if scaler is None else dict(scaler.state_dict()),
        "scheduler": None if scheduler is None else _plain_state(scheduler),
        "random": random_states(),
        "generators": {name: one.get_state() for name, one in _generators(model)},
    }


def restore(
    state: State,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: Any = None,
    scheduler: Any = None,
) -> None:
    """Put ``state`` back. Gradients are dropped: a replayed update begins without any. A tensor among the attributes of
    modules, such as the last output, may be missing or have another shape.

    Raises UsageError if the model or an optimizer is not of the kind that was recorded.
    """
    held = {one.name: one.tensor for one in survey(model).tensors}
    loose = frozenset(state.get("attributes", ()))  # black boxes of before do not say which are attributes
    lacking = [n for n, tensor in state["tensors"].items() if n not in held and n not in loose and tensor.numel()]
    if lacking:
        raise UsageError(f"the model has no tensor {lacking[0]!r}, which was recorded: give the model of the run.")
    with torch.no_grad():
        for name, tensor in state["tensors"].items():
            if name not in held:
                if name in loose:
                    _bind(model, name, tensor)
                continue
            if held[name].shape != tensor.shape and name not in loose:
                raise UsageError(
                    f"{name} has shape {tuple(held[name].shape)} and was recorded with {tuple(tensor.shape)}: give the "
                    "model of the run."
                )
            if (held[name].dtype, held[name].shape) != (tensor.dtype, tensor.shape):
                held[name].data = tensor.to(held[name].device)
            else:
                held[name].data.copy_(tensor)
    modules = dict(_modules(model))
    for path, flag in state["training"].items():
        if path in modules:
            modules[path].training = flag
    for name, parameter in parameters_of(model).items():
        parameter.requires_grad_(state["requires_grad"].get(name, parameter.requires_grad))
        parameter.grad = None
    set_numbers(model, state["numbers"])
    if len(state["optimizers"]) != len(optimizers):
        raise UsageError(
            f"{len(state['optimizers'])} optimizers were recorded, not {len(optimizers)}: give those of the run."
        )
    for kept, one in zip(state["optimizers"], optimizers, strict=True):
        restore_optimizer(kept, one, parameters_of(model))
    if state["scaler"] is not None and scaler is not None:
        scaler.load_state_dict(state["scaler"])
    if state["scheduler"] is not None and scheduler is not None:
        scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    set_random_states(state["random"])
    for name, generator in _generators(model):
        if name in state["generators"]:
            generator.set_state(state["generators"][name])


def optimizer_state(optimizer: torch.optim.Optimizer, named_: Mapping[str, nn.Parameter]) -> State:
    """Return settings and state of an optimizer; parameters are counted through, and ``members`` are their names by
    group. A tensor of the state is kept with True if it lay on its parameter's device. ``own``: entries of the state
    that belong to no parameter, such as a count of all steps."""
    groups = [settings_of(group) for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        if optimizer.state.get(parameter):
            entries = optimizer.state[parameter].items()
            state[number] = {
                key: [_copy(value), value.device == parameter.device] if isinstance(value, Tensor) else copy.copy(value)
                for key, value in entries
            }
    members = _members(optimizer, named_)
    own = {key: copy.deepcopy(value) for key, value in optimizer.state.items() if _is_own(key, value)}
    return {"kind": type(optimizer).__name__, "groups": groups, "members": members, "state": state, "own": own}


def restore_optimizer(kept: State, optimizer: torch.optim.Optimizer, named_: Mapping[str, nn.Parameter]) -> None:
    """Put back what :func:`optimizer_state` returned. An optimizer that holds the same parameters in other groups gets
    the recorded groups. Raises UsageError for another kind of optimizer, or other parameters."""
    own, recorded = _members(optimizer, named_), kept["members"]
    mine, theirs = ([name for group in groups for name in group] for groups in (own, recorded))
    if kept["kind"] != type(optimizer).__name__ or sorted(mine) != sorted(theirs):
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__} of {len(mine)} parameters, and {kept['kind']} of "
            f"{len(theirs)} was recorded: give that of the run."
        )
    if own != recorded:
        base = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        optimizer.param_groups[:] = [{**base, "params": [named_[name] for name in names]} for names in recorded]
    set_settings(optimizer, kept["groups"])
    restore_moments(kept, optimizer)


def restore_moments(kept: State, optimizer: torch.optim.Optimizer) -> None:
    """Put back the state alone, without the settings of groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in [*optimizer.state.items()]:
        if isinstance(key, Tensor) or _is_own(key, value):
            del optimizer.state[key]
    optimizer.state.update(copy.deepcopy(kept.get("own", {})))  # black boxes of before have none
    for number, entries in kept["state"].items():
        parameter = parameters[int(number)]
        optimizer.state[parameter] = {
            key: value[0].to(parameter.device, copy=True)
            if is_kept(value) and value[1]
            else (value[0].clone() if is_kept(value) else copy.copy(value))
            for key, value in entries.items()
        }
    # as load_state_dict does: an optimizer that keeps lists of its state gathers them anew
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _members(optimizer: torch.optim.Optimizer, named_: Mapping[str, nn.Parameter]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in named_.items()}
    return [[names.get(id(p), "a parameter of no module") for p in group["params"]] for group in optimizer.param_groups]


def settings_of(group: Mapping[str, Any], copied: Callable[[Tensor], Tensor] = _copy) -> State:
    """Return the settings of a parameter group that a file may hold. ``copied``: copies those that are tensors, by
    default to the host, which waits for the device."""
    return {
        key: copied(value.detach()) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params" and _is_setting(value)
    }


def set_settings(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key] = value.to(group[key].device, copy=True)
            else:
                group[key] = value.clone() if isinstance(value, Tensor) else copy.copy(value)


def set_numbers(model: nn.Module, numbers: Mapping[str, Any]) -> None:
    for name, holder, key in numbers_of(model):
        if name in numbers:
            holder[key] = numbers[name]


def torch_random() -> list[Any]:
    """Return torch's random states, of the host and of each GPU in use: those that dropout draws from."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpus]


def set_torch_random(states: Sequence[Tensor]) -> None:
    """Put back what :func:`torch_random` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(list(states[1:]))


def bytes_of(state: State) -> int:
    """Return the size of the tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(bytes_of, state.values()))
    return sum(map(bytes_of, state)) if isinstance(state, list | tuple) else 0


def _generators(model: nn.Module) -> list[tuple[str, torch.Generator]]:
    """Return the generators of torch that the model holds itself."""
    return [(name, one) for name, one in survey(model).generators if isinstance(one, torch.Generator)]


def _bind(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a module the attribute ``name`` that it lacks."""
    path, _, key = name.rpartition(".")
    module = dict(_modules(model)).get(path)
    if module is not None and key.isidentifier():
        setattr(module, key, tensor.to(next(model.parameters()).device, copy=True))


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(each.path, each.module) for each in named(model)]


def is_kept(value: Any) -> bool:
    """Return True for a tensor of an optimizer's state as :func:`optimizer_state` keeps it."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], Tensor)


def _is_own(key: Any, value: Any) -> bool:
    """Return True for an entry of an optimizer's state that belongs to no parameter, and that a file may hold."""
    return isinstance(key, str | int) and _is_plain(value)


def _is_setting(value: Any) -> bool:
    return isinstance(value, Tensor | tuple | list | bool | int | float | str) or value is None


def _plain_state(holder: Any) -> State:
    """Return the state of a scheduler, as far as a file may hold it (functions of a LambdaLR are code, not state)."""
    return {key: copy.deepcopy(value) for key, value in holder.state_dict().items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor | bool | int | float | str) or value is None:
        return True
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, list | tuple) and all(map(_is_plain, value))
