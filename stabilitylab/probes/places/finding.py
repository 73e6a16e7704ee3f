"""Finds the places of any ``nn.Module`` by its structure, or by the names that the caller gives."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from ...errors import UsageError
from ...inputs import expression
from . import axes
from .attending import attends, innermost, is_projection
from .ends import ends
from .expert_products import stacked
from .feedforward import WayBack, way_back, widths
from .naming import lies_in, modules_of, named, unwrapped
from .routing import routing
from .sites import ACTIVATIONS, TAPS, Site, Sites, parts_taken
from .structure import (
    LayerStack,
    Places,
    entered,
    find_stacks,
    is_leaf,
    is_namespace,
    is_norm,
    left,
    onto_vocabulary,
    outside,
)

NOT_PER_TOKEN = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)  # no norms of a token's features
OVER_POSITIONS = "normalises over positions or examples as well, so that no token has a norm there"
SHARED = "is called by several layers, so that it has no layer of its own"
IN_NO_STACK = "is a block of convolutions in no stack of layers: if it is a layer, name the layers with sites="


def find(model: nn.Module, output_site: str | None = None, own: Mapping[str, str] | None = None) -> Sites:
    """Return every site of ``model``. ``output_site`` names the module whose output is F; without it F is each stack's
    output.

    ``own`` replaces what is found: a kind ("layers", "norms", "activations", "outputs") and a regular expression that
    the full names of its modules match. If a Linear is chosen as activation, its input counts, as in
    ``fc2(act(fc1(x)))``.
    """
    modules = modules_of(model)
    given = {kind: _matching(kind, pattern, modules) for kind, pattern in (own or {}).items()}
    place = Places(_own_stacks(given["layers"]) if "layers" in given else find_stacks(model))
    uses = Counter(id(m) for stack in place.stacks for layer in stack.layers.values() for m in layer.modules())
    unplaced: dict[str, dict[str, str]] = {}  # kind -> modules without a place, and why
    if "layers" not in given:
        blocks = dict.fromkeys(outside(modules, place.stacks), IN_NO_STACK)
        unplaced = dict.fromkeys(("stream", "layers", "hidden"), blocks)
    norms = given.get("norms", {})
    if "norms" not in given:
        every = {path: m for path, m in modules.items() if _is_per_token_norm(path, m)}
        norms = {path: m for path, m in every.items() if uses[id(m)] <= 1}
        unplaced["norms"] = {path: SHARED for path in every if path not in norms}
        unplaced["norms"] |= {path: OVER_POSITIONS for path, m in modules.items() if _over_positions(m)}
    if "activations" in given:
        activations = [_activation(path, module, place) for path, module in given["activations"].items()]
    else:
        homes = {home for _, home in routing(modules)}
        found = [site for stack in place.stacks for site in _activations(stack, modules, place, uses, homes)]
        activations = [site for site in found if uses[id(site.module)] <= 1]
        unplaced["activations"] = {site.name: SHARED for site in found if site not in activations}
    if "outputs" in given:
        outputs = [Site(path, m, place(path)[0] or path, sublayer="output") for path, m in given["outputs"].items()]
    else:
        outputs = _outputs(modules, place, None if output_site is None else _named(output_site, model))
    return Sites(
        place=place,
        layers=tuple(_layers(place.stacks)),
        inputs=tuple(_inputs(place.stacks)),
        branches=tuple(_branches(place)),
        norms=tuple(_norm(path, module, modules, place) for path, module in norms.items()),
        activations=tuple(activations),
        outputs=tuple(outputs),
        attentions=tuple(Site(path, modules[path], *place(path)) for path in innermost(modules)),
        logits=tuple(_logits(modules, place)),
        routers=tuple(Site(path, modules[path], *place(path), take="input") for path, _ in routing(modules)),
        modules=modules,
        left_out=unplaced,
    )


def _over_positions(module: nn.Module) -> bool:
    return is_norm(module) and isinstance(module, NOT_PER_TOKEN)


def _matching(kind: str, pattern: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    whole = expression(pattern, f"sites: {kind}:", "one that full names of modules match")
    found = {path: module for path, module in modules.items() if path and whole.fullmatch(path)}
    if not found:
        raise UsageError(f"sites: no module's full name matches {pattern!r} for {kind}{_near(pattern, modules)}.")
    return found


def _own_stacks(layers: Mapping[str, nn.Module]) -> tuple[LayerStack, ...]:
    """Return the caller's layers as stacks: one for each module that holds some of them."""
    stacks: dict[str, dict[str, nn.Module]] = {}
    for path, layer in layers.items():
        stacks.setdefault(path.rpartition(".")[0], {})[path] = layer
    return tuple(
        LayerStack(home or "layers", home, home.rpartition(".")[0], own, tuple(range(1, len(own) + 1)))
        for home, own in stacks.items()
    )


def _taps(module: nn.Module) -> dict[str, nn.Module]:
    """Return the Identity taps of a residual sub-layer; a branch that is not scaled is its own scaled branch. The
    result is empty without a tap "branch"."""
    children = unwrapped(module).named_children()
    taps = {name: child for name, child in children if name in TAPS and isinstance(child, nn.Identity)}
    return {"scaled_branch": taps["branch"], **taps} if "branch" in taps else {}


def _layers(stacks: tuple[LayerStack, ...]) -> Iterator[Site]:
    for stack in stacks:
        for number, path, layer in stack.numbered():
            whole, end = not is_namespace(layer), left(layer)
            streams = parts_taken(end) if whole else ()
            axis = axes.of_layer(layer)
            yield Site(path, end, stack.name, number, whole=whole, streams=streams, features=axis)


def _inputs(stacks: tuple[LayerStack, ...]) -> Iterator[Site]:
    for stack in stacks:
        first = next(iter(stack.layers.values()))
        axis = axes.of_layer(first)
        yield Site(f"{stack.name}.input", entered(first), stack.name, 0, "input", "input", features=axis)


def _branches(place: Places) -> Iterator[Site]:
    for stack in place.stacks:
        for path, layer in stack.layers.items():
            for name, child in unwrapped(layer).named_children():
                if taps := _taps(child):
                    yield Site(f"{path}.{name}", child, *place(f"{path}.{name}"), taps=taps)


def _is_per_token_norm(path: str, module: nn.Module) -> bool:
    return is_norm(module) and not isinstance(module, NOT_PER_TOKEN) and "parametrizations" not in path


def _norm(path: str, module: nn.Module, modules: Mapping[str, nn.Module], place: Places) -> Site:
    taps = _taps(modules[path.rpartition(".")[0]]) if path else {}
    parts = parts_taken(module)  # a fused norm adds the residual itself
    return Site(path, module, *place(path), take="input", taps=taps, streams=parts, features=axes.of_norm(module))


def _activations(
    stack: LayerStack, modules: Mapping[str, nn.Module], place: Places, uses: Counter[int], routed: set[str]
) -> list[Site]:
    """Return the input of the second linear of each feed-forward block, and of each expert (``routed``: the modules
    that hold experts). In a gated block (SwiGLU) the input is the product. In other blocks the site is the output of an
    activation module outside attention, or the input of the second linear if there is no such module."""
    found: list[Site] = []
    for path, layer in stack.layers.items():
        inside = {name: m for name, m in _outside_attention(path, layer) if modules.get(name) is m}
        blocks: dict[str, dict[str, nn.Module]] = {}  # the modules of each expert; "" for those of no expert
        for name, module in inside.items():
            home = next((home for home in routed & inside.keys() if lies_in(name, (home,))), "")
            rest = name.removeprefix(home).split(".")
            single = home and isinstance(unwrapped(inside[home]), (nn.ModuleList, nn.ModuleDict)) and len(rest) > 1
            blocks.setdefault(f"{home}.{rest[1]}" if single else home, {})[name] = module
        for home, members in blocks.items():
            if home and stacked(unwrapped(inside[home])):
                found.append(Site(home, inside[home], *place(home), take="inner", routed=True))
            else:
                found += _of_block(members, place, uses, path, bool(home), layer)
    return found


def _of_block(
    members: Mapping[str, nn.Module], place: Places, uses: Counter[int], path: str, routed: bool, layer: nn.Module
) -> Iterator[Site]:
    linears = [(name, m) for name, m in members.items() if widths(m) is not None]
    own = [name for name, m in members.items() if _is_activation(m) and uses[id(m)] == 1]
    for home, pair in _ways_back(linears, own, members, path).items():
        there = [name for name in own if not home or name.startswith(f"{home}.")]
        if there and not (pair is not None and pair.product):
            for name in there:
                yield Site(name, members[name], *place(name), routed=routed, features=axes.of_layer(layer))
        elif pair is not None:
            stack = not isinstance(pair.module, nn.Linear)
            yield Site(pair.name, pair.module, *place(pair.name), take="input", routed=routed or stack)


def _ways_back(
    linears: list[tuple[str, nn.Module]], own: list[str], members: Mapping[str, nn.Module], layer: str
) -> dict[str, WayBack | None]:
    """Map each module that holds a feed-forward block to its way back. If no module holds a whole block, "" maps to the
    way back of the block whose linears stand in several modules, or to None. ``own``: the activation modules."""
    homes = dict.fromkeys(name.rpartition(".")[0] for name, _ in linears)
    pairs = {home: way_back([each for each in linears if each[0].rpartition(".")[0] == home]) for home in homes}
    pairs = {home: pair for home, pair in pairs.items() if pair is not None}
    mixers = {home for home in pairs if home in members and _convolves(members[home])}  # mixers of state-space layers
    if mixers < pairs.keys():
        pairs = {home: pair for home, pair in pairs.items() if home not in mixers}
    active = {name.rpartition(".")[0] for name in own} - {layer}
    low_rank = {home for home, pair in pairs.items() if pair.widening < 0 and home not in active}
    if low_rank < pairs.keys():  # a pair of low rank beside a feed-forward block is a correction (Gemma 3n's laurel)
        pairs = {home: pair for home, pair in pairs.items() if home not in low_rank}
    return {**pairs} or {"": way_back(linears)}


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(child, axes.CONVOLUTIONS) for _, child in module.named_children())


def _outside_attention(path: str, layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a layer that are no part of its attention, by full name."""
    inside = modules_of(layer)
    attention = [key for key, module in inside.items() if key and attends(module)]
    found = []
    for key, module in inside.items():
        home, _, last = key.rpartition(".")
        siblings = set(unwrapped(inside[home])._modules) if key else set()
        if not lies_in(key, attention) and not (isinstance(module, nn.Linear) and is_projection(last, siblings)):
            found.append((f"{path}.{key}".strip("."), module))
    return found


def _activation(path: str, module: nn.Module, place: Places) -> Site:
    return Site(path, module, *place(path), take="input" if isinstance(module, nn.Linear) else "output")


def _is_activation(module: nn.Module) -> bool:
    return is_leaf(module) and type(module).__name__.lower().endswith(ACTIVATIONS)


def _outputs(modules: Mapping[str, nn.Module], place: Places, output_site: str | None) -> Iterator[Site]:
    if output_site is not None:
        yield Site(output_site, modules[output_site], place(output_site)[0], sublayer="output")
        return
    for stack, path, module in ends(place.stacks, modules):
        yield Site(path, module, stack.name, sublayer="output", streams=parts_taken(module))


def _named(given: str, model: nn.Module) -> str:
    """Return the full name of a module that the caller names by its full name or by its name in ``named_modules()``."""
    every = named(model)
    known = {each.raw: each.path for each in every} | {each.path: each.path for each in every}
    if given not in known:
        raise UsageError(f"output_site {given!r} is no module of the model{_near(given, known)}.")
    return known[given]


def _near(given: str, names: Iterable[str]) -> str:
    """Return in words which names are like the given one, or where all of them are."""
    close = difflib.get_close_matches(given, [name for name in names if name], n=3, cutoff=0.3)
    return f"; near it are {', '.join(close)}" if close else ": give a name of model.named_modules()"


def _logits(modules: Mapping[str, nn.Module], place: Places) -> Iterator[Site]:
    for path in onto_vocabulary(modules, place):
        stack, layer, sublayer = place(path)
        last = place.stacks[-1].name if place.stacks else ""  # the stack whose tokens the head projects
        yield Site(path, modules[path], stack or last, layer, sublayer)
