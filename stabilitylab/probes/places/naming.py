"""Full names of the modules and parameters of any ``nn.Module``, without the parts that wrappers add."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

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


def kept_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return the tensor that a module keeps as ``name``; None if it keeps none. A property is not evaluated, nor is a
    parametrization, since either may change buffers, draw random numbers or raise."""
    own = vars(module)
    kept = (place.get(name) for place in (own.get("_parameters", {}), own.get("_buffers", {}), own))
    return next((tensor for tensor in kept if isinstance(tensor, Tensor)), None)


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
    """The parameters of a model by name, up to date at each call. All modules are searched again only if a module has
    another parameter or another child than at the last call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walk()

    def __call__(self) -> dict[str, nn.Parameter]:
        """Return name -> parameter, as :func:`parameters_of` does: the same dict as before if nothing has changed."""
        held = self._values()
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._walk()
        return self._found

    def _walk(self) -> None:
        modules = named(self._model)
        self._registries: list[dict[str, Any]] = []
        seen: set[nn.Parameter] = set()
        self._found: dict[str, nn.Parameter] = {}
        for each in modules:
            self._registries += (each.module._parameters, each.module._modules)
            for key, parameter in each.module._parameters.items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    self._found[f"{each.path}.{key}".lstrip(".")] = parameter
        self._held = self._values()

    def _values(self) -> list[Any]:
        """Return all parameters and children of the modules that were found."""
        return [*chain.from_iterable(map(dict.values, self._registries))]


def lies_in(path: str, homes: Collection[str]) -> bool:
    """Return True if one of ``homes`` is ``path`` or a module around it, by full names."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in homes for length in range(1, len(parts) + 1))
