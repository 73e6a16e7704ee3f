"""Finds the places of any ``nn.Module`` by structure, or where the caller says that they are."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from ...errors import UsageError
from .attending import attends, innermost, is_projection
from .products import stacked
from .routing import routing
from .sites import ACTIVATIONS, TAPS, Site, Sites
from .structure import (
    LayerStack,
    Places,
    canonical,
    entered,
    find_stacks,
    is_leaf,
    is_namespace,
    is_norm,
    left,
    onto_vocabulary,
    outside,
    unwrapped,
)

NOT_PER_TOKEN = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)  # they normalise over channels
CONVOLUTIONS = nn.modules.conv._ConvNd
OVER_POSITIONS = "normalises over positions or examples as well, so that no token has a norm there"
IN_NO_STACK = "is a block of convolutions in no stack of layers: name layers with sites= if it is one"


def find(model: nn.Module, output_site: str | None = None, own: Mapping[str, str] | None = None) -> Sites:
    """Every site of ``model``; ``output_site`` names the module whose output is F, instead of each stack's.

    ``own`` replaces what is found: a kind ("layers", "norms", "activations", "outputs") and a regular expression that
    the full names of its modules match. Of a Linear chosen as activation the input counts, as in ``fc2(act(fc1(x)))``.
    """
    modules = {canonical(path): module for path, module in model.named_modules()}
    given = {kind: _matching(kind, pattern, modules) for kind, pattern in (own or {}).items()}
    place = Places(_own_stacks(given["layers"]) if "layers" in given else find_stacks(model))
    uses = Counter(id(m) for stack in place.stacks for layer in stack.layers.values() for m in layer.modules())
    norms = given.get("norms") or {path: m for path, m in modules.items() if _is_per_token_norm(path, m, uses)}
    if "activations" in given:
        activations = tuple(_activation(path, module, place) for path, module in given["activations"].items())
    else:
        homes = {home for _, home in routing(modules)}
        activations = tuple(site for stack in place.stacks for site in _activations(stack, place, uses, homes))
    if "outputs" in given:
        outputs = [Site(path, m, place(path)[0] or path, sublayer="output") for path, m in given["outputs"].items()]
    else:
        outputs = _outputs(modules, place, output_site)
    return Sites(
        place=place,
        layers=tuple(_layers(place.stacks)),
        inputs=tuple(_inputs(place.stacks)),
        branches=tuple(_branches(place)),
        norms=tuple(_norm(path, module, modules, place) for path, module in norms.items()),
        activations=activations,
        outputs=tuple(outputs),
        attentions=tuple(Site(path, modules[path], *place(path)) for path in innermost(modules)),
        logits=tuple(_logits(modules, place)),
        routers=tuple(Site(path, modules[path], *place(path), take="input") for path, _ in routing(modules)),
        modules=modules,
        left_out={
            "norms": {}
            if "norms" in given
            else {path: OVER_POSITIONS for path, m in modules.items() if _over_positions(m)},
            **dict.fromkeys(
                ("stream", "layers", "hidden"),
                {} if "layers" in given else dict.fromkeys(outside(model, place.stacks), IN_NO_STACK),
            ),
        },
    )


def _over_positions(module: nn.Module) -> bool:
    return is_norm(module) and isinstance(module, NOT_PER_TOKEN)


def _matching(kind: str, pattern: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    found = {path: module for path, module in modules.items() if path and re.fullmatch(pattern, path)}
    if not found:
        near = ", ".join(difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)) or "none"
        raise UsageError(f"sites: no module's full name matches {pattern!r} for {kind}; near it are {near}.")
    return found


def _own_stacks(layers: Mapping[str, nn.Module]) -> tuple[LayerStack, ...]:
    """The caller's layers: one stack for each module that holds some."""
    stacks: dict[str, dict[str, nn.Module]] = {}
    for path, layer in layers.items():
        stacks.setdefault(path.rpartition(".")[0], {})[path] = layer
    return tuple(
        LayerStack(home or "layers", home, home.rpartition(".")[0], own, tuple(range(1, len(own) + 1)))
        for home, own in stacks.items()
    )


def _taps(module: nn.Module) -> dict[str, nn.Module]:
    """The Identity taps of a residual sub-layer; a branch that is not scaled is its own scaled branch."""
    children = unwrapped(module).named_children()
    taps = {name: child for name, child in children if name in TAPS and isinstance(child, nn.Identity)}
    return {"scaled_branch": taps["branch"], **taps} if "branch" in taps else {}


def _layers(stacks: tuple[LayerStack, ...]) -> Iterator[Site]:
    for stack in stacks:
        for number, path, layer in stack.numbered():
            maps = _channels_first(layer)
            yield Site(path, left(layer), stack.name, number, channels_first=maps, whole=not is_namespace(layer))


def _channels_first(layer: nn.Module) -> int:
    """Layers of convolutions pass maps on, (B, C, H, W); without a Linear also (B, C, T): dimensions from which."""
    kinds = [type(module) for module in layer.modules()]
    if not any(issubclass(kind, CONVOLUTIONS) for kind in kinds):
        return 0
    return 4 if any(issubclass(kind, nn.Linear) for kind in kinds) else 3


def _inputs(stacks: tuple[LayerStack, ...]) -> Iterator[Site]:
    for stack in stacks:
        first = next(iter(stack.layers.values()))
        maps = _channels_first(first)
        yield Site(f"{stack.name}.input", entered(first), stack.name, 0, "input", "input", channels_first=maps)


def _branches(place: Places) -> Iterator[Site]:
    for stack in place.stacks:
        for path, layer in stack.layers.items():
            for name, child in unwrapped(layer).named_children():
                if taps := _taps(child):
                    yield Site(f"{path}.{name}", child, *place(f"{path}.{name}"), taps=taps)


def _is_per_token_norm(path: str, module: nn.Module, uses: Counter[int]) -> bool:
    per_token = is_norm(module) and not isinstance(module, NOT_PER_TOKEN) and "parametrizations" not in path
    return per_token and uses[id(module)] <= 1  # one that several layers share has no layer of its own


def _norm(path: str, module: nn.Module, modules: Mapping[str, nn.Module], place: Places) -> Site:
    taps = _taps(modules[path.rpartition(".")[0]]) if path else {}
    maps = 3 if getattr(module, "data_format", "") == "channels_first" else 0
    return Site(path, module, *place(path), take="input", taps=taps, channels_first=maps)


def _activations(stack: LayerStack, place: Places, uses: Counter[int], routed: set[str]) -> Iterator[Site]:
    """What the second linear of each feed-forward block sees, and of each expert's (``routed``: their homes): the
    product in a gated block (SwiGLU), else what an activation module outside attention yields, or the input of the
    second linear where there is none."""
    for path, layer in stack.layers.items():
        inside = dict(_outside_attention(path, layer))
        blocks: dict[str, dict[str, nn.Module]] = {}  # each expert, and what is none
        for name, module in inside.items():
            home = next((home for home in routed if name == home or name.startswith(f"{home}.")), "")
            rest = name.removeprefix(home).split(".")
            single = home and isinstance(inside[home], (nn.ModuleList, nn.ModuleDict)) and len(rest) > 1
            blocks.setdefault(f"{home}.{rest[1]}" if single else home, {})[name] = module
        for home, members in blocks.items():
            if home and stacked(unwrapped(inside[home])):
                yield Site(home, inside[home], *place(home), take="inner", routed=True)
            else:
                yield from _of_block(members, place, uses, bool(home), _channels_first(layer))


def _of_block(
    members: Mapping[str, nn.Module], place: Places, uses: Counter[int], routed: bool, maps: int
) -> Iterator[Site]:
    linears = [(name, m) for name, m in members.items() if _widths(m) is not None]
    own = [name for name, m in members.items() if _is_activation(m) and uses[id(m)] == 1]
    homes = dict.fromkeys(name.rpartition(".")[0] for name, _ in linears)
    pairs = {home: _second_linear([each for each in linears if each[0].rpartition(".")[0] == home]) for home in homes}
    pairs = {home: pair for home, pair in pairs.items() if pair is not None}
    mixers = {home for home in pairs if home in members and _convolves(members[home])}  # of a state-space layer
    if mixers < pairs.keys():
        pairs = {home: pair for home, pair in pairs.items() if home not in mixers}
    if not pairs:  # they stand in several modules
        pairs = {"": _second_linear(linears)}
    for home, pair in pairs.items():
        there = [name for name in own if not home or name.startswith(f"{home}.")]
        if there and not (pair is not None and pair[2]):
            for name in there:
                yield Site(name, members[name], *place(name), routed=routed, channels_first=maps)
        elif pair is not None:
            name, module, _ = pair
            stack = not isinstance(module, nn.Linear)
            yield Site(name, module, *place(name), take="input", routed=routed or stack)


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(child, CONVOLUTIONS) for _, child in module.named_children())


def _outside_attention(path: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a layer that are no part of its attention, by full name."""
    attention = [key for key, module in layer.named_modules() if key and attends(module)]
    found = []
    for key, module in layer.named_modules():
        home, _, last = key.rpartition(".")
        siblings = {name for name, _ in layer.get_submodule(home).named_children()} if key else set()
        part = any(key == outer or key.startswith(f"{outer}.") for outer in attention)
        if not part and not (isinstance(module, nn.Linear) and is_projection(last, siblings)):
            found.append((canonical(f"{path}.{key}"), module))
    return found


def _activation(path: str, module: nn.Module, place: Places) -> Site:
    return Site(path, module, *place(path), take="input" if isinstance(module, nn.Linear) else "output")


def _second_linear(linears: list[tuple[str, nn.Module]]) -> tuple[str, nn.Module, bool] | None:
    """The linear that leads back from the inner width, and whether what enters it is a product of two projections."""
    for later, (name, second) in enumerate(linears):
        inner, outer = _widths(second) or (0, 0)
        before = [_widths(one) or (0, 0) for _, one in linears[:later]]
        ways = [leaving for entering, leaving in before if entering == outer]
        whole = ways.count(inner)
        fused = 2 * inner in ways and inner > outer
        if whole or fused:  # a gate and a value apart, or both from one linear of twice the width
            return name, second, whole != 1
    return None


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """What a linear takes and yields; also one that holds the weights of all experts, (E, out, in)."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if "expert" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and weight.dim() == 3:
        return weight.shape[2], weight.shape[1]
    return None


def _is_activation(module: nn.Module) -> bool:
    return is_leaf(module) and type(module).__name__.lower().endswith(ACTIVATIONS)


def _outputs(modules: Mapping[str, nn.Module], place: Places, output_site: str | None) -> Iterator[Site]:
    if output_site is not None:
        path = canonical(output_site)
        if path not in modules:
            close = difflib.get_close_matches(path, modules, n=3, cutoff=0.3)
            raise UsageError(f"output_site {output_site!r} is no module of the model; near it are {', '.join(close)}.")
        yield Site(path, modules[path], place(path)[0], sublayer="output")
        return
    for stack in place.stacks:
        path, module = _end(stack, modules)
        yield Site(path, module, stack.name, sublayer="output")


def _end(stack: LayerStack, modules: Mapping[str, nn.Module]) -> tuple[str, nn.Module]:
    """What yields a stack's output: its home; where that is the model, which may end in a vocabulary projection, or
    nothing that is called, the norm behind the stack, or else its last layer."""
    path = stack.path
    while path:
        home = path.rpartition(".")[0]
        if home and not is_namespace(modules[home]):
            return home, modules[home]
        names = [name for name in modules if name and name.rpartition(".")[0] == home]
        behind = names[names.index(path) + 1 :] if path in names else []
        if norm := next((name for name in behind if is_norm(modules[name])), None):
            return norm, modules[norm]
        path = home
    last, layer = list(stack.layers.items())[-1]
    return last, left(layer)


def _logits(modules: Mapping[str, nn.Module], place: Places) -> Iterator[Site]:
    for path in onto_vocabulary(modules, place):
        stack, layer, sublayer = place(path)
        last = place.stacks[-1].name if place.stacks else ""  # the tokens that it projects
        yield Site(path, modules[path], stack or last, layer, sublayer)
