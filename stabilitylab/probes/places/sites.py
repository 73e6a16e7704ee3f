"""Where to tap a model: a place, and all places of one model by kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ...schema import Row
from .naming import unwrapped
from .structure import LayerStack, Places

TAPS = ("branch", "scaled_branch", "shortcut")
ACTIVATIONS = ("elu", "silu", "swish", "mish", "activation")  # endings of class names, in lower case
KINDS = ("layers", "norms", "activations", "outputs")  # that a caller may choose himself
TAPPED = ("stream", "norms", "activations", "outputs")  # that a model may show by stabilitylab.tap


class FeatureAxis:
    """Finds the dimension of a norm's input that its weight spans, at the first call at which only one has its size.

    ``size``: the weight's. ``expected``: which it is where several have that size.
    """

    def __init__(self, size: int, expected: int = -1) -> None:
        self.size, self.expected = size, expected
        self.known: int | None = None

    def __call__(self, shape: Sequence[int]) -> int:
        """-1 for the last dimension, or where none has the size."""
        if self.known is not None and -len(shape) <= self.known < len(shape) and shape[self.known] == self.size:
            return self.known
        fitting = [axis for axis in range(min(1, len(shape) - 1), len(shape)) if shape[axis] == self.size]
        named = [-1 if axis == len(shape) - 1 else axis for axis in fitting]
        if len(named) == 1:
            self.known = named[0]
        return self.expected if self.expected in named else named[-1] if named else -1


@dataclass(frozen=True, eq=False)
class Site:
    """One place: a module, whether its input or its output counts, and where it stands (layers count from 1).

    ``routed``: inside an expert, which sees some tokens in an order of its own, so that no mask fits it.
    ``channels_first``: tensors of so many dimensions or more have their channels in dimension 1; 0 for none.
    ``take="inner"``: what stacked experts multiply with their last weight, ``caught`` in the held-out pass. Not
    ``whole``: the last module of a layer that is never called itself, so that what enters is not the layer's input.
    ``streams``: the arguments of a layer that takes the residual stream in parts, a branch and the rest, and yields it
    so: the stream is their sum. ``features``: finds the dimension that holds the features.
    """

    name: str
    module: nn.Module
    stack: str = ""
    layer: int = 0
    sublayer: str = ""
    take: Literal["input", "output", "inner"] = "output"
    taps: Mapping[str, nn.Module] = field(default_factory=dict)
    routed: bool = False
    channels_first: int = 0
    whole: bool = True
    streams: tuple[str, ...] = ()
    features: FeatureAxis | None = None
    caught: list[torch.Tensor] = field(default_factory=list)

    def value(self, entering: Any, leaving: Any) -> Any:
        """What counts here of a call of its module."""
        if self.take == "inner":
            return self.caught[0] if self.caught else None
        return entering if self.take == "input" else leaving

    @property
    def row(self) -> Row:
        return Row(self.name, self.stack, self.layer, self.sublayer)

    @property
    def mask(self) -> str | None:
        """Whose mask weights the tokens here; None: all count."""
        return None if self.routed else self.stack

    def arranged(self, value: Any) -> Any:
        """``value`` with its features in the last dimension, (..., width)."""
        if self.features is not None and isinstance(value, torch.Tensor):
            return value.movedim(self.features(value.shape), -1)
        maps = self.channels_first and isinstance(value, torch.Tensor) and value.dim() >= self.channels_first
        return value.movedim(1, -1) if maps else value


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
    routers: tuple[Site, ...]  # what enters each router of experts
    modules: Mapping[str, nn.Module]
    readers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # kind -> the probes that look there
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # kind -> modules without a place, and why
    tapped: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)  # kind -> values shown by stabilitylab.tap

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        return self.place.stacks

    def __str__(self) -> str:
        return _listed(self)

    def shown(self, kind: str) -> tuple[Site, ...]:
        """Values that the model shows as places of this kind: last of their kind, as they came by."""
        return self.tapped.get(kind, ())

    def nearest(self, kind: str) -> list[str]:
        """Modules that come closest to being a site of this kind."""
        words = {
            "norms": ("norm",),
            "activations": (*ACTIVATIONS, "act", "mlp", "ffn"),
            "attentions": ("att", "head"),
            "logits": ("head", "output", "linear"),
            "routers": ("router", "gate", "expert"),
        }.get(kind, ("layer", "block"))
        named = [f"{path} ({type(module).__name__})" for path, module in self.modules.items() if path]
        return [name for name in named if any(word in name.lower() for word in words)][:5] or named[:5]


def layers(sites: Sites) -> tuple[Site, ...]:
    return sites.layers


def norms(sites: Sites) -> tuple[Site, ...]:
    return (*sites.norms, *sites.shown("norms"))


def activations(sites: Sites) -> tuple[Site, ...]:
    return (*sites.activations, *sites.shown("activations"))


def outputs(sites: Sites) -> tuple[Site, ...]:
    return (*sites.outputs, *sites.shown("outputs"))


def attentions(sites: Sites) -> tuple[Site, ...]:
    return sites.attentions


def logits(sites: Sites) -> tuple[Site, ...]:
    return sites.logits


def routers(sites: Sites) -> tuple[Site, ...]:
    return sites.routers


def branches(sites: Sites) -> tuple[Site, ...]:
    """Sub-layers that show what they add, and what they add it to."""
    return tuple(site for site in sites.branches if "shortcut" in site.taps)


def stream(sites: Sites) -> tuple[Site, ...]:
    """The residual stream: what enters each stack, then the output of every sub-layer (of every layer without taps)."""
    tapped = {(site.stack, site.layer) for site in sites.branches}
    plain = [site for site in sites.layers if (site.stack, site.layer) not in tapped]
    order = {stack.name: rank for rank, stack in enumerate(sites.stacks)}
    found = sorted((*sites.inputs, *sites.branches, *plain), key=lambda site: (order[site.stack], site.layer))
    return (*found, *sites.shown("stream"))


def parts_taken(module: nn.Module) -> tuple[str, ...]:
    """The arguments in which a layer takes the residual stream, where one is called ``residual`` (Mamba's blocks, those
    of flash-attn): all up to that one; empty for any other layer."""
    try:
        names = tuple(inspect.signature(unwrapped(module).forward).parameters)
    except (TypeError, ValueError):  # not written in Python
        return ()
    return names[: names.index("residual") + 1] if "residual" in names else ()


def taken_up(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> torch.Tensor | None:
    """The residual stream that enters a layer in parts, as arguments of these names."""
    return summed([*args[: len(names)], *(kwargs[name] for name in names if name in kwargs)])


def summed(parts: Any) -> torch.Tensor | None:
    """The residual stream of which a layer takes, or yields, the parts: the sum of the first floating-point tensor and
    of all others of its shape, detached."""
    if not isinstance(parts, (tuple, list)):
        parts = [parts]
    total = None
    for part in parts:
        if isinstance(part, torch.Tensor) and part.is_floating_point():
            if total is None:
                total = part.detach()
            elif part.shape == total.shape:
                total = total + part.detach()
    return total


def tensor_of(value: Any) -> torch.Tensor | None:
    """The hidden state in a module's input or output: the first floating-point tensor, depth first."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if value is None:
        return None
    if not isinstance(value, (tuple, list)):
        inner = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "__dataclass_fields__") else {}
        value = inner.values()
    for item in value:
        if (found := tensor_of(item)) is not None:
            return found
    return None


def hidden_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What enters a module: ``hidden_states`` where an argument has that name, else the first floating-point tensor."""
    if args and not kwargs and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return args[0]  # by far the most frequent
    for given in (kwargs.get("hidden_states"), args, kwargs):
        if (found := tensor_of(given)) is not None:
            return found
    return None


HEADER = ("kind", "stack", "layers", "count", "places", "module", "probes")


def _listed(sites: Sites) -> str:
    """One line for places of one kind that differ in their layer alone: how many, what, and which probes look there."""
    lines = [HEADER, *_lines(sites)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    none = [
        f"no {kind} found; nearest are {', '.join(sites.nearest(kind))}: if some are, name them with "
        f"sites={{{kind!r}: 'a regular expression of their full names'}}"
        for kind in KINDS
        if not _of(sites, kind)
    ]
    return "\n".join((*rows, *none))


def _lines(sites: Sites) -> Iterator[tuple[str, ...]]:
    for kind in (*KINDS, "attentions", "logits", "routers", "branches"):
        groups: dict[tuple[str, str, str], list[Site]] = {}
        for site in _of(sites, kind):
            groups.setdefault((site.stack, _any_layer(site, sites), type(site.module).__name__), []).append(site)
        probes = ", ".join(sites.readers.get(kind, ())) or "-"
        for (stack, places, module), found in groups.items():
            numbers = sorted({site.layer for site in found})
            span = f"{numbers[0]}-{numbers[-1]}" if numbers[-1] else "-"
            taken = {"input": "input of ", "inner": "inside "}.get(found[0].take, "")
            yield kind, stack or "-", span, str(len(found)), places, f"{taken}{module}", probes


def _any_layer(site: Site, sites: Sites) -> str:
    """The site's name with * for the number of its layer."""
    stack = next((stack for stack in sites.stacks if stack.name == site.stack), None)
    if stack is None or not site.layer:
        return site.name
    layer = next(path for number, path, _ in stack.numbered() if number == site.layer)
    home, _, last = layer.rpartition(".")
    return f"{home}.{re.sub('[0-9]+', '*', last)}{site.name.removeprefix(layer)}".lstrip(".")


def _of(sites: Sites, kind: str) -> Sequence[Site]:
    return getattr(sites, kind)
