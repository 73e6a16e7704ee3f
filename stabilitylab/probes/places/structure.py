"""The structure of any ``nn.Module``: canonical names, stacks of like layers, and which of them a module lies in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...schema import Row

WRAPPERS = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
GENERIC = {"layers", "layer", "h", "block", "blocks"}


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


def canonical(path: str) -> str:
    """``path`` without the components that compilation, checkpointing and data-parallel wrappers add."""
    return ".".join(part for part in path.split(".") if part and part not in WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    while (inner := next((m for key, m in module.named_children() if key in WRAPPERS), None)) is not None:
        module = inner
    return module


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
    """The outermost lists of layers; of a list of stages (ResNet, Swin) the lists inside each stage."""
    taken: set[str] = set()

    def walk(path: str, module: nn.Module) -> Iterator[LayerStack]:
        chosen = _layers_of(path, module)
        if not chosen or all("stage" in type(unwrapped(child)).__name__.lower() for _, child in chosen):
            for key, child in module.named_children():
                yield from walk(f"{path}.{key}", child)
            return
        full = canonical(path)
        home, _, last = full.rpartition(".")
        name = (home if last in GENERIC else full) or last or "layers"
        name = full if name in taken else name
        taken.add(name)
        layers = {canonical(f"{path}.{key}"): child for key, child in chosen}
        yield LayerStack(name, full, home, layers, _numbers(module, [key for key, _ in chosen]))

    return tuple(walk("", model))


def _layers_of(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a list that are its layers.

    Of a ModuleList, or a ModuleDict whose keys are numbers, all that are no leaf, if two are of one class (hybrids and
    models with a cross-attention layer every few mix classes); of a Sequential those of the most frequent class, since
    it may begin and end with something else. One alone is a stack where the list's name says so.
    """
    numbered = isinstance(module, nn.ModuleDict) and bool(module) and all(key.isdigit() for key in module)
    if not (isinstance(module, (nn.ModuleList, nn.Sequential)) or numbered):
        return []
    children = [(key, child) for key, child in module.named_children() if not is_leaf(child) or _is_bare(child)]
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

    def walk(path: str, module: nn.Module) -> Iterator[str]:
        full = canonical(path)
        if full in layers or is_leaf(module):
            return
        holds = any(not full or layer.startswith(f"{full}.") for layer in layers)
        if not holds and sum(isinstance(each, nn.modules.conv._ConvNd) for each in module.modules()) > 1:
            yield full
            return
        for key, child in module.named_children():
            yield from walk(f"{path}.{key}", child)

    return list(walk("", model)) if layers else []


def onto_vocabulary(modules: Mapping[str, nn.Module], place: Places) -> list[str]:
    """What the model says is its output embedding; else the last linear outside the layers as wide as a vocabulary."""
    says = getattr(modules[""], "get_output_embeddings", None)
    head = says() if callable(says) else None
    rows = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    linears = [
        path for path, module in modules.items() if isinstance(module, nn.Linear) and module.out_features in rows
    ]
    wide = [path for path in linears if not place.row(path).layer]
    return [path for path, module in modules.items() if module is head] or wide[-1:]
