"""Layers that return a branch: the model adds the residual to what they return, outside of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..places.sites import Site

OUTSIDE = (
    "returns a branch, not the residual stream, since the residual is added outside of the layers: name the modules "
    "that return the stream with sites={'layers': ...}, or show it by stabilitylab.tap"
)
LOOKED_AT = 5000  # nodes between two layers
DEEP = 8  # nodes between an addition and one of its terms
# Operators that hand a term on: dropout, a factor, a norm, another type, another layout.
HANDING_ON = {
    "AliasBackward",
    "CloneBackward",
    "DivBackward",
    "ExpandBackward",
    "FusedDropoutBackward",
    "MulBackward",
    "NativeDropoutBackward",
    "NativeLayerNormBackward",
    "PermuteBackward",
    "RegisterPostBackwardFunctionBackward",
    "ReshapeAliasBackward",
    "SqueezeBackward",
    "ToCopyBackward",
    "TransposeBackward",
    "UnsafeViewBackward",
    "UnsqueezeBackward",
    "ViewBackward",
}


class Call(NamedTuple):
    """The last call of a layer: its number in the stack, the node of autograd that made its output, and the nodes of
    its input and of what the input was made of by operators that hand it on."""

    number: int
    output: Any
    inputs: set[Any]


class OutsideResiduals:
    """The search for stacks whose layers return a branch, in the graph of autograd of the first forward. It reads no
    tensor.

    The proof is an addition behind layer l whose terms are the input of layer l and what layer l returned (perhaps
    behind a dropout, a factor or a norm), on the way to the input of layer l + 1. ``found`` is called with each stack
    in which all pairs of neighbouring layers have it, when the forward has ended. If a pair lacks it, or if autograd
    records no node (frozen layers, reentrant checkpointing, compiled code), the output of a layer counts as the stream.
    """

    def __init__(self, layers: Iterable[Site], found: Callable[[str], None]) -> None:
        stacks: dict[str, list[nn.Module]] = {}
        for site in layers:
            stacks.setdefault(site.stack, []).append(site.module)
        self._found = found
        self._places = {
            module: (stack, number)
            for stack, modules in stacks.items()
            for number, module in enumerate(modules)
            if len(modules) > 1 and modules.count(module) == 1
        }
        self._last: dict[str, Call] = {}
        self._proofs: dict[str, bool] = {}  # stack -> True if all pairs so far have the proof

    @property
    def looks(self) -> bool:
        return bool(self._places)

    def visit(self, module: nn.Module, entering: Any, leaving: Any) -> None:
        """Note a call of a layer. If the graph cannot be read, the search ends, and training goes on."""
        try:
            self._visit(module, entering, leaving)
        except Exception:
            self._places.clear()
            self._proofs.clear()

    def _visit(self, module: nn.Module, entering: Any, leaving: Any) -> None:
        if (place := self._places.get(module)) is None:
            return
        stack, number = place
        last = self._last.pop(stack, None)
        x, y = _node(entering), _node(leaving)
        if x is None or y is None or self._proofs.get(stack) is False:
            return
        if last is not None and number == last.number + 1:
            self._proofs[stack] = is_added_outside(x, last.output, last.inputs)
        self._last[stack] = Call(number, y, handed_on(x))

    def end(self, whole: bool) -> None:
        """Conclude, if a whole forward has ended; forget what a broken one has shown."""
        self._last.clear()
        proofs, self._proofs = self._proofs, {}
        if whole and proofs:
            self._places.clear()
            for stack, proof in proofs.items():
                if proof:
                    self._found(stack)


def rows_of(sites: Sequence[Site], layers: Iterable[Site]) -> list[int]:
    """Return the rows of a table that read what one of these layers returns."""
    modules = {site.module for site in layers}
    return [row for row, site in enumerate(sites) if site.take == "output" and site.module in modules]


def is_added_outside(node: Any, output: Any, inputs: set[Any]) -> bool:
    """Return True if, between the node ``output`` and ``node``, which is behind it, an addition has these two terms:
    ``output`` and one of ``inputs``."""
    seen, waiting = {output, *inputs}, deque([node])
    while waiting and len(seen) < LOOKED_AT:
        node = waiting.popleft()  # the nearest first
        if node in seen:
            continue
        seen.add(node)
        terms = [term for term, _ in node.next_functions if term is not None]
        written = _kind(node) == "CopySlices"  # in place, into a view: its term is what the view is of
        if (written or _kind(node) == "AddBackward") and len(terms) == 2:
            for one, other in (terms, terms[::-1]):
                if other in inputs and (one in handed_on(output) if written else output in handed_on(one)):
                    return True
        waiting.extend(terms)
    return False


def handed_on(node: Any) -> set[Any]:
    """Return a node, and the nodes from which operators hand a value on to it."""
    found, edge = {node}, {node}
    for _ in range(DEEP):
        edge = {
            term
            for each in edge
            if _kind(each) in HANDING_ON
            for term, _ in each.next_functions
            if term is not None and _kind(term) != "AccumulateGrad"
        } - found
        found |= edge
    return found


def _kind(node: Any) -> str:
    return node.name().rpartition("::")[2].rstrip("0123456789")


def _node(value: Any) -> Any:
    return value.grad_fn if isinstance(value, torch.Tensor) else None
