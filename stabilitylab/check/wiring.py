"""Parameters that training cannot reach, reaches twice, or leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import listed
from ..probes.places.naming import lies_in, named, parameters_of
from .bounds import not_checked, weigh, weigh_names
from .result import Check

DETACHED, UNUSED, ZERO, SHARED = "detached", "unused parameters", "gradient of zeros", "shared memory"
LEFT_OUT, DOUBLES = "not in the optimizer", "optimizer doubles"


class _Memory(NamedTuple):
    """The memory of a parameter: its first byte, and the byte after its last."""

    first: int
    last: int
    name: str
    parameter: Tensor


@contextmanager
def used_modules(model: nn.Module) -> Iterator[set[str]]:
    """Yield the full names of the modules that are called with data within this context: an expert without tokens is
    not used."""
    used: set[str] = set()

    def hook(name: str) -> Any:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [own for own in (*args, *kwargs.values()) if isinstance(own, Tensor)]
            if not tensors or any(own.numel() for own in tensors):
                used.add(name)

        return called

    handles = [each.module.register_forward_pre_hook(hook(each.path), with_kwargs=True) for each in named(model)]
    try:
        yield used
    finally:
        for handle in handles:
            handle.remove()


def without_gradient(model: nn.Module) -> dict[str, bool]:
    """Return the trainable matrices without a gradient other than zeros: name -> True if there is no gradient at all,
    since the loss does not depend on the matrix."""
    return {
        name: parameter.grad is None
        for name, parameter in parameters_of(model).items()
        if parameter.requires_grad and parameter.dim() > 1 and not _has_gradient(parameter)
    }


def _has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def reached(still: Mapping[str, bool], used: Collection[str], layers: Collection[str], count: int) -> Iterator[Check]:
    """Check which matrices the loss reaches. ``still``: matrices without a gradient, in the first step and after it, as
    :func:`without_gradient` returns them; ``layers``: names of the modules that are layers; ``count``: number of
    matrices."""
    found: dict[str, list[str]] = {DETACHED: [], UNUSED: [], ZERO: []}
    for name, missing in sorted(still.items()):
        home = name.rpartition(".")[0]
        found[(DETACHED if lies_in(home, layers) and home in used else UNUSED) if missing else ZERO].append(name)
    for kind, names in found.items():
        measured = f"{len(names)} of {count}: {listed(names)}"
        if names or kind == DETACHED:
            got = f"the loss depends on {count - sum(still.values())} of {count} matrices"
            yield weigh_names(kind, names, measured if names else got)


def shared_memory(model: nn.Module) -> Check:
    """Check that no two parameters share memory without being one parameter."""
    spans: dict[Any, list[_Memory]] = {}
    count = 0
    for name, parameter in parameters_of(model).items():
        if parameter.device.type == "meta" or hasattr(parameter, "placements") or not parameter.numel():
            continue
        count += 1
        first = parameter.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        last = first + (reach + 1) * parameter.element_size()
        spans.setdefault(parameter.device, []).append(_Memory(first, last, name, parameter))
    pairs = [pair for own in spans.values() for pair in _overlapping(sorted(own, key=lambda span: span[:3]))]
    if not count:
        return not_checked(SHARED, "the parameters have no memory of their own here")
    which = "; ".join(f"{one} and {other}" for one, other in pairs[:3])
    measured = f"{len(pairs)} of {count} parameters: {which}" if pairs else f"{count} parameters, each its own memory"
    return weigh(SHARED, float(len(pairs)), measured, site=pairs[0][1] if pairs else "")


def _overlapping(spans: Sequence[_Memory]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two spans that share memory; ``spans`` are in order."""
    reaching: list[_Memory] = []  # the spans that reach the next one
    for span in spans:
        reaching = [one for one in reaching if span.first < one.last]
        yield from ((one.name, span.name) for one in reaching if _meet(one, span))
        reaching.append(span)


def _meet(one: _Memory, other: _Memory) -> bool:
    """True if a byte belongs to both. Columns of one matrix lie between each other, and share none."""
    if one.parameter.is_contiguous() and other.parameter.is_contiguous():
        return True
    marks = torch.zeros(max(one.last, other.last) - one.first, dtype=torch.bool)
    own, others = (_bytes(marks, span.parameter, span.first - one.first) for span in (one, other))
    own.fill_(True)
    return bool(others.any())


def _bytes(marks: Tensor, parameter: Tensor, first: int) -> Tensor:
    """Return the marks of a parameter's bytes; ``first`` is the number of its first byte."""
    size = parameter.element_size()
    dims = [(n, stride * size) for n, stride in zip(parameter.shape, parameter.stride(), strict=True) if stride]
    return marks.as_strided([*(n for n, _ in dims), size], [*(stride for _, stride in dims), 1], first)


def held(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Check]:
    """Check that each trainable parameter with a gradient is in a group of an optimizer, and none is held twice."""
    if not optimizers:
        yield from (not_checked(name, "no optimizer was given") for name in (LEFT_OUT, DOUBLES))
        return
    count = Counter(id(own) for one in optimizers for group in one.param_groups for own in group["params"])
    every: Mapping[str, Tensor] = parameters_of(model)
    own = {name: one for name, one in every.items() if one.requires_grad and one.grad is not None}
    missing = [name for name, one in own.items() if not count[id(one)]]
    who = "it holds" if len(optimizers) == 1 else f"the {len(optimizers)} optimizers hold"
    measured = f"{len(missing)} of {len(own)}: {listed(missing)}" if missing else f"{who} all {len(own)}"
    yield weigh_names(LEFT_OUT, missing, measured)
    doubled = [name for name, one in every.items() if count[id(one)] > 1]
    measured = f"{len(doubled)} of {len(every)}: {listed(doubled)}"
    yield weigh_names(DOUBLES, doubled, measured if doubled else "no parameter is held twice")
