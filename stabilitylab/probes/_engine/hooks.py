"""The hooks on a model's modules: in eager code they measure at once, in compiled code they leave an operator.

The operator has no result; an ordered effect keeps it where it stands, in the forward graph and, for what a gradient
passes, in the backward graph. What it does is looked up when it runs, by a key: a tensor, so that layers of one kind,
which share compiled code, keep sharing it. Watching makes no graph, break or compilation more.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from ..places.sites import hidden_state, tensor_of
from ..places.structure import unwrapped

Value = torch.Tensor | None


class Visitor(Protocol):
    """What measures when a module is called."""

    model: nn.Module

    def visit(self, hook: Hook, x: Value, y: Value, compiled: bool = False) -> None: ...

    def visit_gradient(self, hook: Hook, gradient: torch.Tensor, of_input: bool) -> None: ...


class Hook:
    """A module's forward hook, for all that ``visitor`` wants there.

    ``needs_input``: whether anything reads what enters the module; ``gradient_of``: whose gradient is wanted, of the
    "input" and of the "output". ``compiled``: whether it stands in compiled code, where it cannot be taken away.
    A copy or a pickle of the module carries a hook that does nothing.
    """

    def __init__(
        self, visitor: Visitor, module: nn.Module, wanted: Any, needs_input: bool, gradient_of: frozenset[str]
    ) -> None:
        self.visitor: Visitor | None = visitor
        self.module, self.wanted = module, wanted
        self.model = unwrapped(visitor.model)
        self.needs_input = needs_input
        self.of_input, self.of_output = "input" in gradient_of, "output" in gradient_of
        self.compiled = False
        self._handle: Any = None
        number = 3 * next(_numbers)
        self.key, self.input_key, self.output_key = (torch.tensor(number + k) for k in range(3))
        _HOOKS[number] = self

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            if module is self.module:
                do = _at_once if _callback() in (None, False) else _apart
                do(_measure, self, args, kwargs, output)
        elif torch.is_grad_enabled() and self.model.training:
            x = hidden_state(args, kwargs) if self.needs_input else None
            y = tensor_of(output)
            _visit(None if x is None else x.detach(), None if y is None else y.detach(), self.key)
            if self.of_output and y is not None and y.requires_grad:
                key = self.output_key
                y.register_hook(lambda gradient: _visit(None, gradient, key))
            if self.of_input and x is not None and x.requires_grad:
                other = self.input_key
                x.register_hook(lambda gradient: _visit(gradient, None, other))

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_kept, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing

    @property
    def attached(self) -> bool:
        return self._handle is not None

    def attach(self) -> None:
        if self._handle is None:
            for number, other in list(self.module._forward_hooks.items()):
                if isinstance(other, Hook) and other.visitor is None:  # of an earlier watch
                    del self.module._forward_hooks[number], self.module._forward_hooks_with_kwargs[number]
            self._handle = self.module.register_forward_hook(self, with_kwargs=True)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


    def let_go(self) -> None:
        """For good. In compiled code it stays where it is, since that would be compiled anew, and does nothing."""
        self.visitor, self.wanted = None, ()
        if not self.compiled:
            self.detach()


class RootHook:
    """A hook on the whole model, which says when a pass begins or ends; compiled code does without."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            (_at_once if _callback() in (None, False) else _apart)(self._call)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_kept, ()

    def __deepcopy__(self, memo: Any) -> Any:
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a copy of a watched module has in place of its hooks."""


def _nothing_kept() -> Callable[..., None]:
    return nothing


_numbers = itertools.count()
_HOOKS: WeakValueDictionary[int, Hook] = WeakValueDictionary()


def _run(x: Value, y: Value, key: torch.Tensor) -> None:
    """The operator, where compiled code comes to it."""
    number, kind = divmod(int(key), 3)
    if (hook := _HOOKS.get(number * 3)) is None or hook.visitor is None:
        return
    hook.compiled = True
    with torch.no_grad():
        if kind:
            gradient = x if kind == 1 else y
            assert gradient is not None
            hook.visitor.visit_gradient(hook, gradient, of_input=kind == 1)
        else:
            hook.visitor.visit(hook, x, y, compiled=True)


_LIBRARY = torch.library.Library("stabilitylab", "DEF")
_LIBRARY.define("visit(Tensor? x, Tensor? y, Tensor key) -> ()", tags=[torch.Tag.pt2_compliant_tag])
_LIBRARY.impl("visit", _run, "CompositeExplicitAutograd")
torch.library.register_fake("stabilitylab::visit", lambda x, y, key: None, lib=_LIBRARY)
_visit: Any = torch.ops.stabilitylab.visit.default
_register_effectful_op(_visit, _EffectType.ORDERED)


def _measure(hook: Hook, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    if hook.visitor is not None:
        hook.visitor.visit(hook, hidden_state(args, kwargs), tensor_of(output))


def _at_once(call: Callable[..., None], *args: Any) -> None:
    call(*args)


_apart = _at_once  # without compiling what is called
# what compiles the Python functions that are called now: beside compiled code, as hooks of a compiled module itself are
_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def keep_apart() -> None:
    """Keeps hooks that run beside compiled code, those of a compiled module itself, from becoming graphs of their own;
    inside it they are part of its graph as ever."""
    global _apart
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.eval_frame import skip_code

        _apart = torch.compiler.disable(_at_once) if _apart is _at_once else _apart
        for code in (Hook.__call__.__code__, RootHook.__call__.__code__):
            skip_code(code)


def forget_compiled() -> bool:
    """Has all compiled code of this process compiled anew at its next call, since hooks that come after the first one
    are passed over in silence; False where there is none."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo import convert_frame

    if not convert_frame.input_codes.seen:
        return False
    torch.compiler.reset()
    return True
