"""Full names of the modules and parameters of any ``nn.Module``, without the parts that wrappers add."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import nn

# Classes that pass each call on to a module that they hold, by package and name -> the attribute that holds it.
WRAPPERS: Mapping[tuple[str, str], str] = {
    ("torch", "DistributedDataParallel"): "module",
    ("torch", "DataParallel"): "module",
    ("torch", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch", "OptimizedModule"): "_orig_mod",  # of torch.compile
    ("torch", "ActivationWrapper"): "_checkpoint_wrapped_module",  # of checkpoint_wrapper and offload_wrapper
    ("torch", "AveragedModel"): "module",
    ("deepspeed", "DeepSpeedEngine"): "module",
    ("megatron", "DistributedDataParallel"): "module",
    ("megatron", "Float16Module"): "module",
    ("apex", "DistributedDataParallel"): "module",
}
GENERIC = {"layers", "layer", "h", "block", "blocks"}  # names of lists of layers that say nothing else


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module to which all wrappers around it pass calls on."""
    while (key := held_by_wrapper(module)) is not None:
        module = module._modules[key]  # pyright: ignore[reportAssignmentType]
    return module


def held_by_wrapper(module: nn.Module) -> str | None:
    """Return the name of the child to which a wrapper (DistributedDataParallel, torch.compile, ...) passes its calls
    on; None for a module that is no wrapper. The class decides, since any module may have a child of that name."""
    for kind in type(module).__mro__:
        key = WRAPPERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if key is not None and module._modules.get(key) is not None:
            return key
    return None


class Named(NamedTuple):
    """A module, its name in ``named_modules()``, and its full name without the parts that wrappers add."""

    raw: str
    path: str
    module: nn.Module


def named(model: nn.Module) -> list[Named]:
    """Return every module once, under its first name, in the order of ``named_modules()``. The module that a wrapper
    holds has the wrapper's own name."""
    seen: set[nn.Module] = set()

    def walk(raw: str, path: str, module: nn.Module) -> Iterator[Named]:
        seen.add(module)
        yield Named(raw, path, module)
        held = held_by_wrapper(module)
        for key, child in module._modules.items():
            if child is not None and child not in seen:
                own = path if key == held else f"{path}.{key}".lstrip(".")
                yield from walk(f"{raw}.{key}".lstrip("."), own, child)

    return list(walk("", "", model))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Map full name to module. A wrapper and the module that it holds share a name, which maps to the held module."""
    return {each.path: each.module for each in named(model)}


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map full name to parameter, in the order of ``parameters()``, tied parameters once."""
    return ParameterPlaces(model)()


class ParameterPlaces:
    """The places of a model's parameters: found once, since a walk over all modules takes time, and read at each call,
    since a module may get another parameter."""

    def __init__(self, model: nn.Module) -> None:
        seen: set[nn.Parameter] = set()
        self._places: list[tuple[str, dict[str, nn.Parameter | None], str]] = []
        for each in named(model):
            for key, parameter in each.module._parameters.items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    self._places.append((f"{each.path}.{key}".lstrip("."), each.module._parameters, key))

    def __call__(self) -> dict[str, nn.Parameter]:
        """Return name -> parameter, as :func:`parameters_of` does."""
        found = ((name, registry.get(key)) for name, registry, key in self._places)
        return {name: parameter for name, parameter in found if parameter is not None}


def lies_in(path: str, homes: Collection[str]) -> bool:
    """Return True if one of ``homes`` is ``path`` or a module around it, by full names."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in homes for length in range(1, len(parts) + 1))
