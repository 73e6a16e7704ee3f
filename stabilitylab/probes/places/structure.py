"""The structure of any ``nn.Module``: stacks of like layers, and which of them a module lies in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...schema import Row
from .naming import GENERIC, lies_in, modules_of, named, unwrapped
from .routing import routing


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A list of layers; ``path`` names the list itself, ``home`` its parent ("" for the model).

    ``numbers``: those of the layers, from 1. They are the model's own where it counts its layers: a stage of a pipeline
    that holds layers 6 to 11 has 7 to 12.
    """

    name: str
    path: str
    home: str
    layers: Mapping[str, nn.Module]
    numbers: tuple[int, ...]

    def numbered(self) -> Iterator[tuple[int, str, nn.Module]]:
        """(number, path, layer), first to last."""
        for number, (path, layer) in zip(self.numbers, self.layers.items(), strict=True):
            yield number, path, layer


class Places:
    """Tells a module's stack, layer and sub-layer from its path."""

    def __init__(self, stacks: tuple[LayerStack, ...]) -> None:
        self.stacks = stacks
        self._layers = {path: (stack.name, number) for stack in stacks for number, path, _ in stack.numbered()}

    def __call__(self, path: str) -> tuple[str, int, str]:
        row = self.row(path)
        return row.stack, row.layer, row.sublayer

    def row(self, path: str) -> Row:
        """The row of the sub-layer that ``path`` lies in: the layer's child on the way there, or ``path`` itself."""
        if path in self._layers:
            return Row(path, *self._layers[path], "")
        parts = path.split(".")
        for length in range(1, len(parts)):
            home = ".".join(parts[:length])
            if home in self._layers:
                inner = parts[length:]
                end = next((i for i, part in enumerate(inner) if i and not part.isdigit()), len(inner))
                sublayer = ".".join(inner[:end])
                return Row(f"{home}.{sublayer}", *self._layers[home], sublayer)
        owners = [stack.name for stack in self.stacks if stack.home and path.startswith(f"{stack.home}.")]
        if not owners and len(self.stacks) == 1:
            owners = [self.stacks[0].name]
        return Row(path, (owners or [""])[0], 0, parts[-1])


def is_leaf(module: nn.Module) -> bool:
    return not module._modules  # any(module.children()) would ask a compiled child for its length


def is_namespace(module: nn.Module) -> bool:
    """Does it hold modules that others call, and have no forward of its own (ModuleList, ModuleDict, a bare Module)?
    Hooks on it never fire."""
    inner = unwrapped(module)
    return type(inner).forward is nn.Module.forward and "forward" not in vars(inner)


def entered(module: nn.Module) -> nn.Module:
    """The module itself; of a namespace its first one that is called, if they are called in the order they stand in."""
    found = _called(module, first=True)  # a module may have a length, so that "or" would ask for it
    return module if found is None else found


def left(module: nn.Module) -> nn.Module:
    """The module itself; of a namespace its last one that is called, if they are called in the order they stand in."""
    found = _called(module, first=False)
    return module if found is None else found


def _called(module: nn.Module, first: bool) -> nn.Module | None:
    if not is_namespace(module):
        return module
    children = [child for _, child in module.named_children()]
    for child in children if first else reversed(children):
        if (found := _called(child, first)) is not None:
            return found
    return None


def is_norm(module: nn.Module) -> bool:
    return is_leaf(module) and "norm" in type(module).__name__.lower()


def find_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """The outermost lists of layers; of a list of stages (ResNet, Swin) the lists inside each stage.

    A list of experts is none. A layer that stands in several lists belongs to the first, under its first name.
    """
    paths = {each.module: each.path for each in named(model)}
    experts = {home for _, home in routing({path: module for module, path in paths.items()})}
    names: set[str] = set()
    walked: set[nn.Module] = set()
    taken: set[str] = set()

    def walk(module: nn.Module) -> Iterator[LayerStack]:
        if module in walked:
            return
        walked.add(module)
        full = paths[module]
        chosen = [] if full in experts else _layers_of(full, module)
        if not chosen or all("stage" in type(unwrapped(child)).__name__.lower() for _, child in chosen):
            for child in module._modules.values():
                if child is not None:
                    yield from walk(child)
            return
        layers = {paths[child]: (key, child) for key, child in chosen if not lies_in(paths[child], taken)}
        if not layers:
            return
        taken.update(layers)
        home, _, last = full.rpartition(".")
        name = (home if last in GENERIC else full) or last or "layers"
        name = full if name in names else name
        names.add(name)
        numbers = _numbers(module, [key for key, _ in layers.values()])
        yield LayerStack(name, full, home, {path: child for path, (_, child) in layers.items()}, numbers)

    return tuple(walk(model))


def _layers_of(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a list that are its layers.

    Of a ModuleList, or a ModuleDict whose keys are numbers, all that are no leaf, if two are of one class (hybrids and
    models with a cross-attention layer every few mix classes); of a Sequential those of the most frequent class, since
    it may begin and end with something else. One alone is a stack where the list's name says so.
    """
    numbered = isinstance(module, nn.ModuleDict) and bool(module) and all(key.isdigit() for key in module)
    if not (isinstance(module, (nn.ModuleList, nn.Sequential)) or numbered):
        return []
    children = [
        (key, child)
        for key, child in module.named_children()
        if not is_leaf(unwrapped(child)) or _is_bare(unwrapped(child))
    ]
    if not children:
        return []
    kind, count = Counter(type(unwrapped(child)) for _, child in children).most_common(1)[0]
    if isinstance(module, nn.Sequential):
        return [(key, child) for key, child in children if type(unwrapped(child)) is kind] if count > 1 else []
    last = path.rpartition(".")[2]
    alone = len(children) == 1 and last.rpartition("_")[2] in GENERIC
    return children if count > 1 or last in GENERIC or alone else []


def _is_bare(module: nn.Module) -> bool:
    """Does it hold several matrices, and no module: a layer whose parameters stand in the block itself?"""
    own = sum(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return own > 1 and not is_torchs(module)


def is_torchs(module: nn.Module) -> bool:
    """Is its class torch's own? fully_shard makes one of torch's and of the caller's."""
    return all(kind is object or kind.__module__.split(".")[0] == "torch" for kind in type(module).__mro__)


def _numbers(module: nn.Module, keys: Sequence[str]) -> tuple[int, ...]:
    """From 1; in a list or a dict of numbers the model's own."""
    if isinstance(module, nn.Sequential) or not all(key.isdigit() for key in keys):
        return tuple(range(1, len(keys) + 1))
    return tuple(int(key) + 1 for key in keys)


def outside(model: nn.Module, stacks: tuple[LayerStack, ...]) -> list[str]:
    """Blocks of several convolutions that stand in no stack, as the middle of a U-net does: outermost first names."""
    layers = {path for stack in stacks for path in stack.layers}
    found: set[str] = set()
    for path, module in modules_of(model).items():
        holds = any(not path or layer.startswith(f"{path}.") for layer in layers)
        inside = holds or is_leaf(module) or lies_in(path, layers | found)
        if not inside and sum(isinstance(each, nn.modules.conv._ConvNd) for each in module.modules()) > 1:
            found.add(path)
    return [path for path in modules_of(model) if path in found] if layers else []


def onto_vocabulary(modules: Mapping[str, nn.Module], place: Places) -> list[str]:
    """What the model says is its output embedding; else the last linear outside the layers as wide as a vocabulary."""
    model = modules[""]
    says = getattr(type(model), "get_output_embeddings", None)  # a child may be called so
    head = says(model) if callable(says) else None
    rows = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    linears = [
        path for path, module in modules.items() if isinstance(module, nn.Linear) and module.out_features in rows
    ]
    wide = [path for path in linears if not place.row(path).layer]
    return [path for path, module in modules.items() if module is head] or wide[-1:]
