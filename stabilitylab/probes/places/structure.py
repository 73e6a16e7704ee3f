"""The structure of any ``nn.Module``: canonical names, stacks of like layers, and which of them a module lies in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ...schema import Row

WRAPPERS = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
GENERIC = {"layers", "layer", "h", "block", "blocks"}


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A list of like layers; ``path`` names the list itself, ``home`` its parent ("" for the model)."""

    name: str
    path: str
    home: str
    layers: Mapping[str, nn.Module]


class Places:
    """Tells a module's stack, layer and sub-layer from its path."""

    def __init__(self, stacks: tuple[LayerStack, ...]) -> None:
        self.stacks = stacks
        self._layers = {path: (s.name, number) for s in stacks for number, path in enumerate(s.layers, start=1)}

    def __call__(self, path: str) -> tuple[str, int, str]:
        row = self.row(path)
        return row.stack, row.layer, row.sublayer

    def row(self, path: str) -> Row:
        """The row of the sub-layer that ``path`` lies in: the layer's child on the way there, or ``path`` itself."""
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


def is_norm(module: nn.Module) -> bool:
    return is_leaf(module) and "norm" in type(module).__name__.lower()


def find_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """The outermost lists of like layers; of a list of stages (ResNet, Swin) the lists inside each stage."""
    taken: set[str] = set()

    def walk(path: str, module: nn.Module) -> Iterator[LayerStack]:
        chosen = _like_children(path, module)
        if not chosen or all("stage" in type(unwrapped(child)).__name__.lower() for _, child in chosen):
            for key, child in module.named_children():
                yield from walk(f"{path}.{key}", child)
            return
        full = canonical(path)
        home, _, last = full.rpartition(".")
        name = (home if last in GENERIC else full) or last or "layers"
        name = full if name in taken else name
        taken.add(name)
        yield LayerStack(name, full, home, {canonical(f"{path}.{key}"): child for key, child in chosen})

    return tuple(walk("", model))


def _like_children(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a list that are its layers: the most frequent class that is not a leaf, at least two of it."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    children = [(key, child) for key, child in module.named_children() if not is_leaf(child)]
    if not children:
        return []
    kind, count = Counter(type(unwrapped(child)) for _, child in children).most_common(1)[0]
    single = isinstance(module, nn.ModuleList) and path.rpartition(".")[2] in GENERIC
    return [(key, child) for key, child in children if type(unwrapped(child)) is kind] if count > 1 or single else []


def attending(modules: Mapping[str, nn.Module]) -> list[str]:
    """Modules with parameters that call themselves attention and hold no other such module."""

    def attends(module: nn.Module) -> bool:
        name = type(module).__name__.lower()
        return ("attention" in name or "attn" in name) and next(module.parameters(), None) is not None

    found = [path for path, module in modules.items() if path and attends(module)]
    outer = {path[:end] for path in found for end, letter in enumerate(path) if letter == "."}
    return [path for path in found if path not in outer]


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
