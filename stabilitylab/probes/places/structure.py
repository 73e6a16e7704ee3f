"""The structure of any ``nn.Module``: stacks of like layers, and the stack, layer and sub-layer of a module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...schema import Row
from .naming import GENERIC, lies_in, named, unwrapped
from .routing import routing


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A list of layers; ``path`` names the list itself, ``home`` its parent ("" for the model). If the layers are
    attributes of one module, ``path`` names the last of them.

    ``numbers``: the numbers of the layers, from 1. If the keys of the list are numbers, these count: a stage of a
    pipeline that holds layers 6 to 11 has the numbers 7 to 12.
    """

    name: str
    path: str
    home: str
    layers: Mapping[str, nn.Module]
    numbers: tuple[int, ...]

    def numbered(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield (number, path, layer), first to last."""
        for number, (path, layer) in zip(self.numbers, self.layers.items(), strict=True):
            yield number, path, layer


class Places:
    """Finds a module's stack, layer and sub-layer by its path."""

    def __init__(self, stacks: tuple[LayerStack, ...]) -> None:
        self.stacks = stacks
        self._layers = {path: (stack.name, number) for stack in stacks for number, path, _ in stack.numbered()}

    def __call__(self, path: str) -> tuple[str, int, str]:
        row = self.row(path)
        return row.stack, row.layer, row.sublayer

    def row(self, path: str) -> Row:
        """Return the row of the sub-layer that ``path`` lies in: the layer's child on the way there, or ``path``
        itself."""
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
    """Return True for a module that holds modules that others call and that has no forward of its own (ModuleList,
    ModuleDict, a bare Module). A hook on such a module never fires."""
    inner = unwrapped(module)
    return type(inner).forward is nn.Module.forward and "forward" not in vars(inner)


def entered(module: nn.Module) -> nn.Module:
    """Return the module itself; for a namespace its first called module, if modules are called in the order of
    registration."""
    found = _called(module, first=True)  # "or" would ask a module for its length
    return module if found is None else found


def left(module: nn.Module) -> nn.Module:
    """Return the module itself; for a namespace its last called module, if modules are called in the order of
    registration."""
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
    """Return the outermost lists of layers; for a list of stages (ResNet, Swin) the lists inside each stage.

    A list of experts is no stack. A layer that stands in several lists belongs to the first one, under its first name.
    Attributes ``layer1``, ``layer2``, ... of one module are a list, too.
    """
    paths = {each.module: each.path for each in named(model)}
    experts = {home for _, home in routing({path: module for module, path in paths.items()})}
    names: set[str] = set()
    walked: set[nn.Module] = set()
    taken: set[str] = set()

    def holds_list(layer: nn.Module) -> bool:
        inner = [module for module in layer.modules() if module in paths and paths[module] not in experts]
        return any(_layers_of(paths[module], module) for module in inner)

    def as_stack(full: str, stem: str, layers: Mapping[int, nn.Module]) -> LayerStack:
        own = {paths[layer]: layer for layer in layers.values()}
        taken.update(own)
        name = stem.rpartition("_")[0] or full or "layers"
        name = f"{full}.{stem}".lstrip(".") if name in names else name
        names.add(name)
        return LayerStack(name, [*own][-1], full, own, tuple(number + (0 in layers) for number in layers))

    def walk(module: nn.Module) -> Iterator[LayerStack]:
        if module in walked:
            return
        walked.add(module)
        full = paths[module]
        chosen = [] if full in experts else _layers_of(full, module)
        if not chosen or all("stage" in type(unwrapped(child)).__name__.lower() for _, child in chosen):
            for stem, layers in ({} if chosen or full in experts else _as_attributes(module)).items():
                if not any(holds_list(layer) for layer in layers.values()):
                    yield as_stack(full, stem, layers)
            for child in module._modules.values():
                if child is not None and paths[child] not in taken:
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
    """Return the children of a list that are its layers.

    In a ModuleList, or in a ModuleDict whose keys are numbers, all children that are no leaf are layers (hybrids and
    models with a cross-attention layer every few layers mix classes). Keys such as ``layer_0`` count as numbers if the
    children have one class. In a Sequential the children of the most frequent
    class are layers, if there are two: it may begin and end with something else. A leaf that holds several matrices
    itself counts as no leaf. A single child is a layer if the name of the list says so.
    """
    numbered = isinstance(module, nn.ModuleDict) and _is_numbered(path, module)
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


def _is_numbered(path: str, module: nn.ModuleDict) -> bool:
    """Return True if the keys are numbers, or numbers behind one word that names layers; it may be any word in a dict
    that is called "layers" or "blocks"."""
    if not module or all(key.isdigit() for key in module):
        return bool(module)
    found = [re.fullmatch(r"(.*?)[_-]?\d+", key) for key in module]
    stems = {match and match[1].lower() for match in found}
    alike = len({type(unwrapped(child)) for child in module.values()}) == 1
    named = path.rpartition(".")[2] in GENERIC or stems <= GENERIC
    return len(module) > 1 and len(stems) == 1 and None not in stems and alike and named


def _as_attributes(module: nn.Module) -> dict[str, dict[int, nn.Module]]:
    """Return the children that are layers by their names (``layer1``, ``block_2``, ``encoder_layer3``), by the name
    without its number: at least two, of one class that is no container. Blocks of convolutions are none."""
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return {}
    found: dict[str, dict[int, nn.Module]] = {}
    for key, child in module.named_children():
        match = re.fullmatch(r"((?:\w+_)?(?:layer|block))_?(\d+)", key)
        if match and not is_leaf(unwrapped(child)):
            found.setdefault(match[1], {})[int(match[2])] = child
    return {stem: dict(sorted(layers.items())) for stem, layers in found.items() if _are_layers([*layers.values()])}


def _are_layers(children: Sequence[nn.Module]) -> bool:
    kinds = {type(unwrapped(child)) for child in children}
    containers = any(issubclass(kind, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) for kind in kinds)
    inner = [module for child in children for module in child.modules()]
    of_images = any(isinstance(m, nn.modules.conv._ConvNd) and m.weight.dim() > 3 for m in inner)
    return len(children) > 1 and len(kinds) == 1 and not containers and not of_images


def _is_bare(module: nn.Module) -> bool:
    """Return True for a module that holds several matrices itself and whose class is not torch's: the layer of a leaf
    block."""
    own = sum(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return own > 1 and not is_torchs(module)


def is_torchs(module: nn.Module) -> bool:
    """Return True if the class and all its bases are torch's own. fully_shard gives a module a class with one base of
    torch's and one of the caller's."""
    return all(kind is object or kind.__module__.split(".")[0] == "torch" for kind in type(module).__mro__)


def _numbers(module: nn.Module, keys: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of layers: key + 1 in a list or a dict of numbers; 1, 2, ... in a Sequential or under other
    keys."""
    if isinstance(module, nn.Sequential) or not all(key.isdigit() for key in keys):
        return tuple(range(1, len(keys) + 1))
    return tuple(int(key) + 1 for key in keys)


def outside(modules: Mapping[str, nn.Module], stacks: tuple[LayerStack, ...]) -> list[str]:
    """Return the blocks of several convolutions in no stack, as the middle of a U-net: the names of the outermost
    blocks."""
    layers = {path for stack in stacks for path in stack.layers}
    if not layers:
        return []
    found: list[str] = []
    for path, module in modules.items():
        holds = any(not path or layer.startswith(f"{path}.") for layer in layers)
        inside = holds or is_leaf(module) or lies_in(path, layers.union(found))
        if not inside and sum(isinstance(each, nn.modules.conv._ConvNd) for each in module.modules()) > 1:
            found.append(path)
    return found


def onto_vocabulary(modules: Mapping[str, nn.Module], place: Places) -> list[str]:
    """Return the name of the output embedding that the model names by ``get_output_embeddings()``; else of the last
    linear outside the layers that is as wide as an embedding has rows. The list is empty if there is none."""
    model = modules[""]
    says = getattr(type(model), "get_output_embeddings", None)  # of the class: a child may have that name
    head = says(model) if callable(says) else None
    rows = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    linears = [
        path for path, module in modules.items() if isinstance(module, nn.Linear) and module.out_features in rows
    ]
    wide = [path for path in linears if not place.row(path).layer]
    return [path for path, module in modules.items() if module is head] or wide[-1:]
