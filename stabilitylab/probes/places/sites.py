"""Places at which a model is tapped: one place, and all places of one model by kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ...schema import Row
from .axes import ChannelAxis, FeatureAxis
from .naming import unwrapped
from .structure import LayerStack, Places, is_namespace

TAPS = ("branch", "scaled_branch", "shortcut")
ACTIVATIONS = ("elu", "silu", "swish", "mish", "activation")  # endings of class names, in lower case
KINDS = ("layers", "norms", "activations", "outputs")  # kinds that a caller may choose with sites=
LISTED = (*KINDS, "attentions", "logits", "routers", "branches")  # kinds that a list of places shows
TAPPED = ("stream", "norms", "activations", "outputs")  # kinds that a model may show by stabilitylab.tap


class Parts:
    """A group of tensors of one shape that are read as one: its value is their mean. Its gradient is the sum of their
    gradients, which is the gradient of a change that moves all of them alike."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._mean: torch.Tensor | None = tensors[0] if len(tensors) == 1 else None

    @property
    def mean(self) -> torch.Tensor:
        """The mean of the tensors, the same tensor object at each access."""
        if self._mean is None:  # no cached_property, whose lock a compiler does not know
            self._mean = torch.stack([tensor.detach() for tensor in self.tensors]).mean(0)
        return self._mean

    @property
    def distinct(self) -> list[torch.Tensor]:
        """The tensors without repetition: the gradient of a tensor that occurs twice is the sum already."""
        return list({id(tensor): tensor for tensor in self.tensors}.values())


Shown = Callable[[Any], Any]  # from a stream to the tensor or the tensors that are read of it


def shown_by(module: nn.Module) -> Shown | None:
    """Return the function by which a layer or a sub-layer says what is read of its streams, its ``shown_stream``; None
    if it has none."""
    found = getattr(unwrapped(module), "shown_stream", None)
    return found if callable(found) else None


def parts_of(value: Any, shown: Shown | None) -> Parts:
    """Return what is read of a stream, or of a tap, whose tuple is read as a whole."""
    found = value if shown is None else shown(value)
    return Parts(found if isinstance(found, (tuple, list)) else (found,))


def read(module: nn.Module, value: Any) -> torch.Tensor | None:
    """Return the tensor that is read of the stream that a module takes or yields."""
    shown = shown_by(module)
    return tensor_of(value) if shown is None else parts_of(value, shown).mean


@dataclass(frozen=True, eq=False)
class Site:
    """A place of a model: a module, the choice of its input or its output, and its stack, layer (from 1) and sub-layer.

    - ``take``: "input", "output", or "inner": the value that stacked experts multiply with their last weight, which is
      ``caught`` in the held-out pass.
    - ``routed``: True if the place is inside an expert. An expert gets some tokens, in an order of its own, so no mask
      fits.
    - ``whole``: False if the site has the last module of a layer that is never called itself. The input of that module
      is not the input of the layer.
    - ``streams``: the argument names of a layer that takes the residual stream in parts (a branch and the rest) and
      returns it in parts too. The stream is their sum.
    - ``features``: a function that finds the dimension of the features in a shape; None if it is the last one.
    - ``inner``: True if the value may be inside a sub-layer, where the mask of its stack need not fit.
    - ``is_tap``: True if the module is an Identity tap, whose tuple is read as a whole (:class:`Parts`).
    """

    name: str
    module: nn.Module
    stack: str = ""
    layer: int = 0
    sublayer: str = ""
    take: Literal["input", "output", "inner"] = "output"
    taps: Mapping[str, nn.Module] = field(default_factory=dict)
    routed: bool = False
    whole: bool = True
    streams: tuple[str, ...] = ()
    features: FeatureAxis | ChannelAxis | None = None
    caught: list[torch.Tensor] = field(default_factory=list)
    inner: bool = False
    is_tap: bool = False

    def value(self, entering: Any, leaving: Any) -> Any:
        """Return the value that counts in a call of the module: its input, its output, or the caught value."""
        if self.take == "inner":
            return self.caught[0] if self.caught else None
        return entering if self.take == "input" else leaving

    @property
    def row(self) -> Row:
        return Row(self.name, self.stack, self.layer, self.sublayer)

    @property
    def mask(self) -> str | None:
        """The stack whose mask weights the tokens at this place; None if all tokens count."""
        return None if self.routed else self.stack

    def arranged(self, value: Any) -> Any:
        """Return ``value`` with its features in the last dimension, (..., width)."""
        if self.features is None or not isinstance(value, torch.Tensor):
            return value
        axis = self.features(value.shape)
        return value if axis == -1 else value.movedim(axis, -1)


@dataclass(frozen=True, eq=False)
class Sites:
    """All places of one model, grouped by kind."""

    place: Places
    layers: tuple[Site, ...]  # each layer
    inputs: tuple[Site, ...]  # the input of each stack's first layer
    branches: tuple[Site, ...]  # sub-layers that show their branch by an Identity tap
    norms: tuple[Site, ...]  # leaf modules that normalise the features of each token
    activations: tuple[Site, ...]  # the input of the second linear of each feed-forward block
    outputs: tuple[Site, ...]  # each stack's output, its final norm included
    attentions: tuple[Site, ...]  # the innermost modules that attend
    logits: tuple[Site, ...]  # the projection onto the vocabulary
    routers: tuple[Site, ...]  # the input of each router of experts
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
        """Return the values that the model shows as places of this kind. They come last of their kind, in the order of
        the calls."""
        return self.tapped.get(kind, ())

    def nearest(self, kind: str) -> list[str]:
        """Return five modules at most whose name or class is like a site of this kind; the first five modules if none
        is."""
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
    """Return the layers of every stack."""
    return sites.layers


def norms(sites: Sites) -> tuple[Site, ...]:
    """Return the normalisation modules, and what the model shows as one by ``tap``."""
    return (*sites.norms, *sites.shown("norms"))


def activations(sites: Sites) -> tuple[Site, ...]:
    """Return the activations of feed-forward blocks, and what the model shows as one by ``tap``."""
    return (*sites.activations, *sites.shown("activations"))


def outputs(sites: Sites) -> tuple[Site, ...]:
    """Return the output of each stack, its final norm included, and what the model shows as one by ``tap``."""
    return (*sites.outputs, *sites.shown("outputs"))


def attentions(sites: Sites) -> tuple[Site, ...]:
    """Return the attention modules."""
    return sites.attentions


def logits(sites: Sites) -> tuple[Site, ...]:
    """Return the projections onto the vocabulary."""
    return sites.logits


def routers(sites: Sites) -> tuple[Site, ...]:
    """Return the routers of mixtures of experts."""
    return sites.routers


def branches(sites: Sites) -> tuple[Site, ...]:
    """Return the sub-layers that show their branch and the shortcut to which they add it."""
    return tuple(site for site in sites.branches if "shortcut" in site.taps)


def stream(sites: Sites) -> tuple[Site, ...]:
    """Return the places of the residual stream: the input of each stack, then the output of every sub-layer (of every
    layer without taps)."""
    tapped = {(site.stack, site.layer) for site in sites.branches}
    plain = [site for site in sites.layers if (site.stack, site.layer) not in tapped]
    order = {stack.name: rank for rank, stack in enumerate(sites.stacks)}
    found = sorted((*sites.inputs, *sites.branches, *plain), key=lambda site: (order[site.stack], site.layer))
    return (*found, *sites.shown("stream"))


def modules_of_layers(sites: Sites) -> tuple[Site, ...]:
    """Return what enters and what leaves each layer, its modules that hold parameters, two levels deep, and its
    Identity taps; and each module outside the layers that holds parameters itself. NAME:in and NAME:out, in the order
    of registration."""
    homes = {path for stack in sites.stacks for path in stack.layers}
    layers = {site.name: site for site in sites.layers}
    found: list[Site] = []
    for path, module in sites.modules.items():
        layer = next((path[:end] for end in _ends(path) if path[:end] in homes), None)
        is_tap = False
        if layer is None:
            inside = bool(path) and any(True for _ in module.parameters(recurse=False))
        else:
            depth = path[len(layer) :].count(".")
            last = path.rpartition(".")[2]
            is_tap = last in TAPS and isinstance(module, nn.Identity)
            inside = is_tap or (depth < 3 and any(True for _ in module.parameters()))
        if not inside or is_namespace(module):
            continue
        known = layers.get(path) or Site(path, module, *sites.place(path))
        site = replace(known, module=module, inner=True, is_tap=is_tap)
        if site.whole and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):  # which take whole numbers
            found.append(replace(site, name=f"{path}:in", take="input"))
        found.append(replace(site, name=f"{path}:out", take="output"))
    return tuple(found)


def _ends(path: str) -> Iterator[int]:
    """Yield the ends of a path and of all its beginnings, the shortest first."""
    yield from (at for at, letter in enumerate(path) if letter == ".")
    yield len(path)


def parts_taken(module: nn.Module) -> tuple[str, ...]:
    """Return the arguments in which a layer takes the residual stream, if one of them is called ``residual`` (Mamba's
    blocks, flash-attn's blocks): all arguments up to that one. The result is empty for any other layer."""
    try:
        names = tuple(inspect.signature(unwrapped(module).forward).parameters)
    except (TypeError, ValueError):  # not written in Python
        return ()
    return names[: names.index("residual") + 1] if "residual" in names else ()


def taken_up(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> torch.Tensor | None:
    """Return the residual stream that enters a layer in parts, as arguments of these names."""
    return summed([*args[: len(names)], *(kwargs[name] for name in names if name in kwargs)])


def summed(parts: Any) -> torch.Tensor | None:
    """Return the residual stream that a layer takes or yields in parts: the sum of the first floating-point tensor and
    of all other floating-point tensors of its shape, detached. None without a floating-point tensor."""
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


def fields_of(value: Any) -> list[Any]:
    """Return the values of the fields of a dataclass, with None for a field that is not set. The list is empty for any
    other object."""
    return [getattr(value, name, None) for name in getattr(type(value), "__dataclass_fields__", ())]


def items_of(value: Any) -> Iterable[Any] | None:
    """Return what a tuple, a list, a mapping or a dataclass holds, with attributes beside its fields; None for any
    other object."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if hasattr(type(value), "__dataclass_fields__"):
        return [*getattr(value, "__dict__", {}).values(), *fields_of(value)]
    return None


def tensor_of(value: Any, seen: dict[int, Any] | None = None) -> torch.Tensor | None:
    """Return the hidden state in a module's input or output: the first floating-point tensor, depth first. ``seen``:
    the objects that were searched already, since an object may hold itself."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if (inner := items_of(value)) is None:
        return None
    seen = {} if seen is None else seen
    if id(value) in seen:
        return None
    seen[id(value)] = value
    for item in inner:
        if (found := tensor_of(item, seen)) is not None:
            return found
    return None


def hidden_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the hidden state that enters a module: ``hidden_states`` if a keyword argument has that name, else the
    first floating-point tensor."""
    if args and not kwargs and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return args[0]  # the most frequent case by far
    for given in (kwargs.get("hidden_states"), args, kwargs):
        if (found := tensor_of(given)) is not None:
            return found
    return None


def tensors_in(value: Any, seen: dict[int, Any] | None = None) -> list[torch.Tensor]:
    """Return all floating-point tensors in a module's input or output, depth first, each once. ``seen``: the objects
    that were searched already."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return []
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    inner = items_of(value)
    return [] if inner is None else [tensor for item in inner for tensor in tensors_in(item, seen)]


def entering_layer(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], before: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the hidden state that enters a layer. ``before``: the hidden state that the layer before has returned. If
    that same tensor is among the arguments and no keyword ``hidden_states`` decides, it is the one; else the rule of
    :func:`hidden_state` holds."""
    x = hidden_state(args, kwargs)
    if before is None or x is before or kwargs.get("hidden_states") is not None:
        return x
    return before if any(each is before for each in tensors_in((args, kwargs))) else x


def through_layer(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, x: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """Return the hidden states that enter and leave a layer, and True if nothing else can have left it. ``x``: the
    choice of :func:`entering_layer`.

    The first floating-point tensor of the output is the hidden state, with two exceptions. A keyword ``hidden_states``
    has chosen the input, the first tensor has the shape of another argument, and one tensor alone has the shape of
    ``hidden_states``: that one leaves (blocks of Flux). The first tensor is an argument that the layer hands on, and
    the only tensor that it does not hand on has the shape of one other argument: that one leaves, and this argument
    enters in the place of the one that is handed on (blocks of PointTransformer).
    """
    y = tensor_of(output)
    if y is None or y is output or len(outs := tensors_in(output)) < 2:
        return x, y, True
    ins = tensors_in((args, kwargs))
    if (named := tensor_of(kwargs.get("hidden_states"))) is not None:
        fitting = [out for out in outs if out.shape == named.shape]
        others = [each.shape for each in ins if each is not named]
        if len(fitting) == 1 and fitting[0] is not y and y.shape in others:
            return x, fitting[0], True
        return x, y, False
    given, handed_on = {id(each) for each in ins}, {id(out) for out in outs}
    if id(y) not in given:
        return x, y, False
    made = [out for out in outs if id(out) not in given]
    fitting = [each for each in ins if id(each) not in handed_on and len(made) == 1 and each.shape == made[0].shape]
    if len(fitting) != 1:
        return x, y, False
    return (fitting[0] if x is not None and id(x) in handed_on else x), made[0], True


HEADER = ("kind", "stack", "layers", "count", "places", "module", "probes")


def _listed(sites: Sites) -> str:
    """List places that differ in their layer alone on one line: kind, number, module, and the probes that look
    there."""
    lines = [HEADER, *_lines(sites)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    rows = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    none = [
        f"no {kind} found; nearest are {', '.join(sites.nearest(kind))}: if some of these are {kind}, name them with "
        f"sites={{{kind!r}: 'a regular expression of their full names'}}"
        for kind in KINDS
        if not _of(sites, kind)
    ]
    return "\n".join((*rows, *none))


def _lines(sites: Sites) -> Iterator[tuple[str, ...]]:
    for kind in LISTED:
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
    """Return the site's name with * for the number of its layer."""
    stack = next((stack for stack in sites.stacks if stack.name == site.stack), None)
    if stack is None or not site.layer:
        return site.name
    layer = next(path for number, path, _ in stack.numbered() if number == site.layer)
    home, _, last = layer.rpartition(".")
    return f"{home}.{re.sub('[0-9]+', '*', last)}{site.name.removeprefix(layer)}".lstrip(".")


def _of(sites: Sites, kind: str) -> Sequence[Site]:
    return getattr(sites, kind)
