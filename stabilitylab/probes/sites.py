"""Where to tap any ``nn.Module``: layers, sub-layers, norms, activations and stack outputs, found by structure."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UsageError
from ..schema import Row

WRAPPERS = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
GENERIC = {"layers", "layer", "h", "block", "blocks"}
TAPS = ("branch", "scaled_branch", "shortcut")
NOT_PER_TOKEN = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)  # they normalise over channels
ACTIVATIONS = ("elu", "silu", "swish", "mish", "activation")  # endings of class names, in lower case


@dataclass(frozen=True, eq=False)
class Site:
    """One place: a module, whether its input or its output counts, and where it stands (layers count from 1)."""

    name: str
    module: nn.Module
    stack: str = ""
    layer: int = 0
    sublayer: str = ""
    take: Literal["input", "output"] = "output"
    taps: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        return Row(self.name, self.stack, self.layer, self.sublayer)


@dataclass(frozen=True, eq=False)
class Stack:
    """A list of like layers; ``path`` names the list itself, ``home`` its parent ("" for the model)."""

    name: str
    path: str
    home: str
    layers: Mapping[str, nn.Module]


class Places:
    """Tells a module's stack, layer and sub-layer from its path."""

    def __init__(self, stacks: tuple[Stack, ...]) -> None:
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


@dataclass(frozen=True, eq=False)
class Sites:
    """All places of one model, grouped by kind."""

    place: Places
    layers: tuple[Site, ...]  # each layer
    inputs: tuple[Site, ...]  # what enters each stack's first layer
    branches: tuple[Site, ...]  # sub-layers that show their branch by an Identity tap
    norms: tuple[Site, ...]  # leaf modules that normalise over the last dimension
    activations: tuple[Site, ...]  # what the activation of each feed-forward block yields
    outputs: tuple[Site, ...]  # each stack's output, its final norm included
    attentions: tuple[Site, ...]  # the innermost modules that attend
    logits: tuple[Site, ...]  # the projection onto the vocabulary
    modules: Mapping[str, nn.Module]

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return self.place.stacks

    def nearest(self, kind: str) -> list[str]:
        """Modules that come closest to being a site of this kind."""
        words = {
            "norms": ("norm",),
            "activations": (*ACTIVATIONS, "act", "mlp", "ffn"),
            "attentions": ("att", "head"),
            "logits": ("head", "output", "linear"),
        }.get(kind, ("layer", "block"))
        named = [f"{path} ({type(module).__name__})" for path, module in self.modules.items() if path]
        return [name for name in named if any(word in name.lower() for word in words)][:5] or named[:5]


def layers(sites: Sites) -> tuple[Site, ...]:
    return sites.layers


def norms(sites: Sites) -> tuple[Site, ...]:
    return sites.norms


def activations(sites: Sites) -> tuple[Site, ...]:
    return sites.activations


def outputs(sites: Sites) -> tuple[Site, ...]:
    return sites.outputs


def attentions(sites: Sites) -> tuple[Site, ...]:
    return sites.attentions


def logits(sites: Sites) -> tuple[Site, ...]:
    return sites.logits


def branches(sites: Sites) -> tuple[Site, ...]:
    """Sub-layers that show what they add, and what they add it to."""
    return tuple(site for site in sites.branches if "shortcut" in site.taps)


def stream(sites: Sites) -> tuple[Site, ...]:
    """The residual stream: what enters each stack, then the output of every sub-layer (of every layer without taps)."""
    tapped = {(site.stack, site.layer) for site in sites.branches}
    plain = [site for site in sites.layers if (site.stack, site.layer) not in tapped]
    order = {stack.name: rank for rank, stack in enumerate(sites.stacks)}
    return tuple(sorted((*sites.inputs, *sites.branches, *plain), key=lambda site: (order[site.stack], site.layer)))


def canonical(path: str) -> str:
    """``path`` without the components that compilation, checkpointing and data-parallel wrappers add."""
    return ".".join(part for part in path.split(".") if part and part not in WRAPPERS)


def tensor_of(value: Any) -> torch.Tensor | None:
    """The hidden state in a module's input or output: the first floating-point tensor, depth first."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if not isinstance(value, (tuple, list)):
        inner = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "__dataclass_fields__") else {}
        value = inner.values()
    for item in value:
        if (found := tensor_of(item)) is not None:
            return found
    return None


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(module.children())


def find_sites(model: nn.Module, output_site: str | None = None) -> Sites:
    """Every site of ``model``; ``output_site`` names the module whose output is F, instead of each stack's."""
    place = Places(tuple(_stacks(model)))
    modules = {canonical(path): module for path, module in model.named_modules()}
    uses = Counter(id(m) for stack in place.stacks for layer in stack.layers.values() for m in layer.modules())
    return Sites(
        place=place,
        layers=tuple(
            Site(path, layer, *place(f"{path}.*")[:2]) for s in place.stacks for path, layer in s.layers.items()
        ),
        inputs=tuple(_inputs(place.stacks)),
        branches=tuple(_branches(place)),
        norms=tuple(_norms(modules, place, uses)),
        activations=tuple(site for stack in place.stacks for site in _activations(stack, place, uses)),
        outputs=tuple(_outputs(modules, place, output_site)),
        attentions=tuple(_attentions(modules, place)),
        logits=tuple(_logits(modules, place)),
        modules=modules,
    )


def _stacks(model: nn.Module) -> Iterator[Stack]:
    taken: set[str] = set()

    def walk(path: str, module: nn.Module) -> Iterator[Stack]:
        chosen = _like_children(path, module)
        if not chosen:
            for key, child in module.named_children():
                yield from walk(f"{path}.{key}", child)
            return
        full = canonical(path)
        home, _, last = full.rpartition(".")
        name = (home if last in GENERIC else full) or last or "layers"
        name = full if name in taken else name
        taken.add(name)
        yield Stack(name, full, home, {canonical(f"{path}.{key}"): child for key, child in chosen})

    yield from walk("", model)


def _like_children(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of a list that are its layers: the most frequent class that is not a leaf, at least two of it."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    children = [(key, child) for key, child in module.named_children() if any(child.children())]
    if not children:
        return []
    kind, count = Counter(type(child) for _, child in children).most_common(1)[0]
    single = isinstance(module, nn.ModuleList) and path.rpartition(".")[2] in GENERIC
    return [(key, child) for key, child in children if type(child) is kind] if count > 1 or single else []


def unwrapped(module: nn.Module) -> nn.Module:
    while (inner := next((m for key, m in module.named_children() if key in WRAPPERS), None)) is not None:
        module = inner
    return module


def _taps(module: nn.Module) -> dict[str, nn.Module]:
    """The Identity taps of a residual sub-layer; a branch that is not scaled is its own scaled branch."""
    children = unwrapped(module).named_children()
    taps = {name: child for name, child in children if name in TAPS and isinstance(child, nn.Identity)}
    return {"scaled_branch": taps["branch"], **taps} if "branch" in taps else {}


def _layers(stacks: tuple[Stack, ...]) -> Iterator[Site]:
    for stack in stacks:
        for number, (path, layer) in enumerate(stack.layers.items(), start=1):
            yield Site(path, layer, stack.name, number)


def _inputs(stacks: tuple[Stack, ...]) -> Iterator[Site]:
    for stack in stacks:
        yield Site(f"{stack.name}.input", next(iter(stack.layers.values())), stack.name, 0, "input", "input")


def _branches(place: Places) -> Iterator[Site]:
    for stack in place.stacks:
        for path, layer in stack.layers.items():
            for name, child in unwrapped(layer).named_children():
                if taps := _taps(child):
                    yield Site(f"{path}.{name}", child, *place(f"{path}.{name}"), taps=taps)


def _norms(modules: Mapping[str, nn.Module], place: Places, uses: Counter[int]) -> Iterator[Site]:
    for path, module in modules.items():
        per_token = is_norm(module) and not isinstance(module, NOT_PER_TOKEN) and "parametrizations" not in path
        if per_token and uses[id(module)] <= 1:  # one that several layers share has no layer of its own
            taps = _taps(modules[path.rpartition(".")[0]]) if path else {}
            yield Site(path, module, *place(path), take="input", taps=taps)


def _activations(stack: Stack, place: Places, uses: Counter[int]) -> Iterator[Site]:
    """Activation modules of a layer outside attention; without one, the input of the second linear."""
    for path, layer in stack.layers.items():
        inside = [(canonical(f"{path}.{key}"), m) for key, m in layer.named_modules() if "att" not in key.lower()]
        own = [(name, m) for name, m in inside if _is_activation(m) and uses[id(m)] == 1]
        if own:
            yield from (Site(name, module, *place(name)) for name, module in own)
            continue
        linears = [(name, m) for name, m in inside if isinstance(m, nn.Linear)]
        for later, (name, second) in enumerate(linears):
            turned = (second.out_features, second.in_features)
            if any((first.in_features, first.out_features) == turned for _, first in linears[:later]):
                yield Site(name, second, *place(name), take="input")
                break


def _is_activation(module: nn.Module) -> bool:
    return not any(module.children()) and type(module).__name__.lower().endswith(ACTIVATIONS)


def _outputs(modules: Mapping[str, nn.Module], place: Places, output_site: str | None) -> Iterator[Site]:
    if output_site is not None:
        path = canonical(output_site)
        if path not in modules:
            close = difflib.get_close_matches(path, modules, n=3, cutoff=0.3)
            raise UsageError(f"output_site {output_site!r} is no module of the model; near it are {', '.join(close)}.")
        yield Site(path, modules[path], place(path)[0], sublayer="output")
        return
    for stack in place.stacks:
        if stack.home:
            yield Site(stack.home, modules[stack.home], stack.name, sublayer="output")
            continue
        # The model itself may end in a vocabulary projection, which is not F: its final norm, or else its last layer.
        children = [(path, module) for path, module in modules.items() if path and "." not in path]
        names = [path for path, _ in children]
        behind = children[names.index(stack.path) + 1 :] if stack.path in names else []
        last = list(stack.layers.items())[-1]
        path, module = next(((path, module) for path, module in behind if is_norm(module)), last)
        yield Site(path, module, stack.name, sublayer="output")


def _attentions(modules: Mapping[str, nn.Module], place: Places) -> Iterator[Site]:
    """Modules with parameters that call themselves attention and hold no other such module."""
    found = {path: module for path, module in modules.items() if path and _attends(module)}
    outer = {path[:end] for path in found for end, letter in enumerate(path) if letter == "."}
    yield from (Site(path, module, *place(path)) for path, module in found.items() if path not in outer)


def _attends(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and next(module.parameters(), None) is not None


def _logits(modules: Mapping[str, nn.Module], place: Places) -> Iterator[Site]:
    """What the model says is its output embedding; else the last linear outside the layers as wide as a vocabulary."""
    says = getattr(modules[""], "get_output_embeddings", None)
    head = says() if callable(says) else None
    rows = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    wide = [
        path
        for path, module in modules.items()
        if isinstance(module, nn.Linear) and module.out_features in rows and not place.row(path).layer
    ]
    chosen = [path for path, module in modules.items() if module is head] or wide[-1:]
    for path in chosen:
        stack, layer, sublayer = place(path)
        last = place.stacks[-1].name if place.stacks else ""  # the tokens that it projects
        yield Site(path, modules[path], stack or last, layer, sublayer)
