"""The output of each stack of layers, its final norm included, by structure and by names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from torch import nn

from .naming import GENERIC
from .structure import LayerStack, is_namespace, is_norm, left

SHORTEST = 2  # letters that a short form has at least ("enc" of "encoder")
Words = tuple[str, ...]
KINDS_OF_NAMES = {*GENERIC, "norm", "norms", "layernorm", "rmsnorm", "ln", "list", "stack"}  # say nothing of whose


def ends(stacks: Sequence[LayerStack], modules: Mapping[str, nn.Module]) -> Iterator[tuple[LayerStack, str, nn.Module]]:
    """Yield each stack with the name of the module that yields its output, and that module.

    The search goes outwards level by level. At each level the module is the parent, if it is called and is not the
    model (which may end in a vocabulary projection), or else a norm behind the stack, see :func:`_shared_out`. If no
    level has one, it is the stack's last layer.
    """
    levels = {stack: _level(stack, modules) for stack in stacks}
    norms: dict[LayerStack, str] = {}
    for home in {home for home, is_called in levels.values() if home is not None and not is_called}:
        there = [stack for stack, level in levels.items() if level == (home, False)]
        norms |= _shared_out(home, there, stacks, modules)
    for stack, (home, is_called) in levels.items():
        if home is not None and is_called:
            yield stack, home, modules[home]
        elif stack in norms:
            yield stack, norms[stack], modules[norms[stack]]
        else:
            last, layer = list(stack.layers.items())[-1]
            yield stack, last, left(layer)


def _level(stack: LayerStack, modules: Mapping[str, nn.Module]) -> tuple[str | None, bool]:
    """Return the innermost module around a stack that is called, or that holds a norm behind the stack, and True if it
    is called; (None, False) if there is none."""
    path = stack.path
    while path:
        home = path.rpartition(".")[0]
        if home and not is_namespace(modules[home]):
            return home, True
        names = _children(home, modules)
        behind = names[names.index(path) + 1 :] if path in names else []
        if any(is_norm(modules[name]) for name in behind):
            return home, False
        path = home
    return None, False


def _children(home: str, modules: Mapping[str, nn.Module]) -> list[str]:
    return [name for name in modules if name and name.rpartition(".")[0] == home]


def _shared_out(
    home: str, stacks: Sequence[LayerStack], every: Sequence[LayerStack], modules: Mapping[str, nn.Module]
) -> dict[LayerStack, str]:
    """Map stacks of one parent to the norms behind them, in the order of registration. A stack of several that has no
    norm of its own is left out.

    A stack that stands alone before norms has the first of them. Of k stacks that stand before k norms each has its
    own, in order, unless a name says otherwise. Else a stack has the norm that is named after it (``dec_norm`` behind
    ``decoder``), and the last stack has a single norm that is named after none. ``every``: all stacks of the model; a
    norm that is named after another stack does not belong to one that stands alone.
    """
    around = [stack for stack in every if not home or stack.path.startswith(f"{home}.")]
    names = {stack: _words(stack.path.removeprefix(f"{home}.")) for stack in around}
    found: dict[LayerStack, str] = {}
    for before, behind in _runs(home, stacks, modules):
        owners = {norm: _owner(norm.rpartition(".")[2], names) for norm in behind}
        if len(before) == 1:
            own = next((norm for norm in behind if owners[norm] in (None, *before)), None)
            found |= {} if own is None else {before[0]: own}
        elif len(before) == len(behind) and all(
            owners[norm] in (None, stack) for stack, norm in zip(before, behind, strict=True)
        ):
            found |= dict(zip(before, behind, strict=True))
        elif len(behind) == 1 and owners[behind[0]] is None:
            found[before[-1]] = behind[0]
        else:
            found |= {stack: norm for norm in reversed(behind) for stack in before if owners[norm] is stack}
    return found


def _runs(
    home: str, stacks: Sequence[LayerStack], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[list[LayerStack], list[str]]]:
    """Yield stacks that follow each other without a norm between them, and the norms that follow them up to the next
    stack."""
    held = {
        name: [stack for stack in stacks if f"{stack.path}.".startswith(f"{name}.")]
        for name in _children(home, modules)
    }
    told = [(name, bool(held[name])) for name in held if held[name] or is_norm(modules[name])]
    runs = [(holds, [name for name, _ in run]) for holds, run in groupby(told, key=lambda each: each[1])]
    for (holds, names), (_, norms) in pairwise(runs):
        if holds:
            yield [stack for name in names for stack in held[name]], norms


def _words(name: str) -> set[Words]:
    """Return the words of each part of a full name that say more than the kind of module, without numbers: ("enc",) of
    ``enc_norm``, ("encoder",) of ``encoder.layers``."""
    parts = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part).lower() for part in name.split("."))
    said = (tuple(word for word in re.findall(r"[a-z]+", part) if word not in KINDS_OF_NAMES) for part in parts)
    return {words for words in said if words}


def _owner(norm: str, names: Mapping[LayerStack, Collection[Words]]) -> LayerStack | None:
    """Return the only stack whose name is that of a norm, or else the only one of which one name begins with the other,
    each word perhaps in a short form."""
    words = _words(norm)
    exact = [stack for stack, own in names.items() if words & set(own)]
    near = [stack for stack, own in names.items() if any(_begins_alike(a, b) for a in words for b in own)]
    return next((found[0] for found in (exact, near) if len(found) == 1), None)


def _begins_alike(one: Words, other: Words) -> bool:
    return all(
        a == b or (min(len(a), len(b)) >= SHORTEST and (a.startswith(b) or b.startswith(a)))
        for a, b in zip(one, other, strict=False)
    )
