"""The hooks on a model's modules: in eager code they measure at once, in compiled code they leave an operator.

The operator ``visit`` has no result; an ordered effect keeps it where it stands. Gradients are seen by an operator that
hands its input on as a copy, and whose backward visits (a tensor's own hook is one more function to trace, in which
Dynamo of torch 2.13 loses what the model does to its caches). What a visit does is looked up when it runs, by a key: a
tensor, so that layers of one kind, which share compiled code, keep sharing it. Watching adds no graph, graph break or
compilation.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from ..places.copied import Copied
from ..places.naming import unwrapped
from ..places.sites import (
    Parts,
    entering_layer,
    fields_of,
    hidden_state,
    parts_of,
    shown_by,
    summed,
    taken_up,
    tensor_of,
    through_layer,
)

Value = torch.Tensor | None


class Visitor(Protocol):
    """The object that measures when a module is called."""

    model: nn.Module
    left_out: bool  # True if compiled code is not measured (:func:`.watchable.split_by_ddp`)
    returned: dict[str, ref[torch.Tensor]]  # stack -> the hidden state that its last layer call has returned
    entered: dict[str, torch.Size]  # stack -> the sizes of the hidden state that its last layer call has got

    def visit(self, hook: Hook, entering: Value | Parts, leaving: Value | Parts, compiled: bool = False) -> None: ...

    def visit_gradient(self, hook: Hook, gradient: torch.Tensor, of_input: bool) -> None: ...

    def pass_over(self) -> None: ...

    def give_up(self, hook: Hook, error: Exception) -> None: ...


class Hook(Copied):
    """The forward hook of a module, for all that ``visitor`` wants there.

    ``needs_input``, ``needs_output``: True if anything reads what enters, or what leaves, the module. ``gradient_of``:
    the values whose gradient is wanted, "input" and "output". ``compiled``: True if the hook stands in compiled code,
    where it cannot be taken away. ``streams``: the arguments whose sum enters, and ``is_tap``: the module is a tap, see
    :class:`~stabilitylab.probes.places.sites.Site`. ``layer_of``: the stack of which the module is a layer, "" if it is
    none.
    """

    def __init__(
        self,
        visitor: Visitor,
        module: nn.Module,
        wanted: Any,
        needs_input: bool,
        needs_output: bool,
        gradient_of: frozenset[str],
        streams: tuple[str, ...] = (),
        is_tap: bool = False,
        layer_of: str = "",
    ) -> None:
        self.visitor: Visitor | None = visitor
        self.layer_of = layer_of
        self.shown, self.is_tap = shown_by(module), is_tap
        self.module, self.wanted, self.streams = module, wanted, streams
        self.model = unwrapped(visitor.model)
        self.needs_input, self.needs_output = needs_input, needs_output
        self.left_out = visitor.left_out
        self.of_input, self.of_output = "input" in gradient_of, "output" in gradient_of
        self.compiled = False
        self.entered = (0, 0)  # which tensor entered the call that runs, and how often it was written to by then
        self.kept: Any = None  # an object that must live as long as this hook
        self._handles: list[Any] = []
        number = 3 * next(_numbers)
        self.key, self.input_key, self.output_key = (torch.tensor(number + k) for k in range(3))
        _HOOKS[number] = self

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            if is_transformed():
                if self.visitor is not None:
                    self.visitor.pass_over()
            elif module is self.module:
                do = _at_once if _callback() in (None, False) else _apart
                do(_measure, self, args, kwargs, output)  # pyright: ignore (it may be compiled)
        elif torch.is_grad_enabled() and self.model.training and not self.left_out:
            if self.in_parts(output):
                return self._visit_parts(args, kwargs, output)
            x = self._entering(args, kwargs) if self.needs_input else None
            y = (summed(output) if self.streams else _tensor(output)) if self.needs_output else None
            _visit(None if x is None else x.detach(), None if y is None else y.detach(), self.key)
            if self.of_output and y is not None and y.requires_grad:
                return _with(output, y, _through(y, self.output_key, False))
        return None

    def in_parts(self, value: Any) -> bool:
        """Return True if several tensors of what enters or leaves the module are read as one."""
        return self.shown is not None or (self.is_tap and isinstance(value, tuple))

    def _visit_parts(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Do the work of a call in compiled code, for streams that are read in parts."""
        x = parts_of(_first(args, kwargs), self.shown).mean if self.needs_input else None
        parts = parts_of(output, self.shown) if self.needs_output else None
        y = None if parts is None else parts.mean
        _visit(None if x is None else x.detach(), None if y is None else y.detach(), self.key)
        return _through_parts(output, parts, self.output_key) if self.of_output and parts is not None else None

    def _entering(self, args: Any, kwargs: Any) -> Value:
        return taken_up(args, kwargs, self.streams) if self.streams else _entering(args, kwargs)

    def attach(self) -> None:
        if not self._handles:
            for number, other in list(self.module._forward_hooks.items()):
                if isinstance(other, Hook) and other.visitor is None:  # of an earlier watch
                    del self.module._forward_hooks[number], self.module._forward_hooks_with_kwargs[number]
            self._handles.append(self.module.register_forward_hook(self, with_kwargs=True))
            if self.needs_input and not self.compiled:
                noted = NotingHook(self)
                self._handles.append(self.module.register_forward_pre_hook(noted, with_kwargs=True))
            if self.of_input and not self.left_out:
                entry = EntryHook(self)
                self._handles.append(self.module.register_forward_pre_hook(entry, with_kwargs=True))

    def note(self, args: Any, kwargs: Any) -> None:
        """Note the tensor that enters the module, and how often it was written to."""
        try:
            found = self.chosen(args, kwargs)
            if self.layer_of and found is not None and self.visitor is not None:
                self.visitor.entered[self.layer_of] = found.shape
            self.entered = _written(found)
        except Exception:  # of the caller's classes: this is told when the module returns
            self.entered = (0, 0)

    def chosen(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Return the hidden state that enters the module."""
        if not self.layer_of or self.visitor is None:
            return hidden_state(args, kwargs)
        before = self.visitor.returned.get(self.layer_of)
        return entering_layer(args, kwargs, None if before is None else before())

    def wrote_into(self, entering: Value | Parts) -> bool:
        """Return True if the module that returns now has written into what entered it."""
        wrote = self.has_written(entering)
        self.entered = (0, 0)
        return wrote

    def has_written(self, value: Value | Parts) -> bool:
        """Return True if this is what entered the module, and something has written into it since."""
        (tensor, version), now = self.entered, _written(value)
        return tensor != 0 and tensor == now[0] and version != now[1]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def let_go(self) -> None:
        """End the hook for good. In compiled code it stays where it is, since the code would be compiled anew, and does
        nothing."""
        self.visitor, self.wanted = None, ()
        if not self.compiled:
            self.detach()


def _written(value: Value | Parts) -> tuple[int, int]:
    """Return which tensor it is, and how often it was written to; (0, 0) if that is not counted."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0, 0
    return id(value), value._version


class NotingHook(Copied):
    """A hook that notes the state of the tensor that enters a module, since the module may write into this tensor. It
    does nothing in compiled code."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not is_transformed():
            do = _at_once if _callback() in (None, False) else _apart
            do(self.hook.note, args, kwargs)  # pyright: ignore (it may be compiled)


class EntryHook(Copied):
    """A hook that shows compiled code the gradient of what enters a module."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and self.hook.model.training:
            if self.hook.in_parts(entering := _first(args, kwargs)):
                return _through_parts((args, kwargs), parts_of(entering, self.hook.shown), self.hook.input_key)
            x = _entering(args, kwargs)
            if x is not None and x.requires_grad:
                through = _through(x, self.hook.input_key, False)
                return _with(args, x, through), {name: _with(given, x, through) for name, given in kwargs.items()}
        return None


class RootHook(Copied):
    """A hook on the whole model, which reports the begin or end of a pass and its values. It does nothing in compiled
    code."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not torch.compiler.is_compiling() and not is_transformed():
            (_at_once if _callback() in (None, False) else _apart)(self._call, *args)


def is_nested(model: nn.Module) -> bool:
    """Return True in a call of the model within a call of itself.

    Only the call stack distinguishes such a call from a call that follows one that raised.
    """
    calls, frame = 0, sys._getframe()
    while frame is not None and calls < 2:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model
        frame = frame.f_back
    return calls == 2


# True inside a transform of torch.func (grad, vmap, jvp), whose tensors nothing outside of it may keep
is_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def in_backward() -> bool:
    """Return True inside a backward pass, where activation checkpointing repeats a forward."""
    return torch._C._current_graph_task_id() != -1


def _entering(args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return what :func:`hidden_state` does, as far as a compiler follows it: not into objects of other kinds, such as
    caches."""
    for given in (kwargs.get("hidden_states"), args, kwargs):
        if (found := _tensor(given)) is not None:
            return found
    return None


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, (tuple, list)):
        value = fields_of(value)
    for item in value:
        if isinstance(item, (torch.Tensor, tuple, list)) and (found := _tensor(item)) is not None:
            return found
    return None


def _first(args: Any, kwargs: Any) -> Any:
    """Return the stream that enters a module."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _through_parts(value: Any, parts: Parts, key: torch.Tensor) -> Any:
    """Return ``value`` with copies of ``parts`` the sum of whose gradients is seen; None without a gradient."""
    own = [part for part in parts.distinct if part.requires_grad]
    if not own:
        return None
    for old, new in zip(own, _through(torch.stack(own), key, True).unbind(), strict=True):
        value = _with(value, old, new)
    return value


def _with(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return ``value`` with tensor ``new`` in the place of ``old``."""
    if value is old:
        return new
    if type(value) in (tuple, list):
        return type(value)([_with(item, old, new) for item in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named one
        return type(value)(*[_with(item, old, new) for item in value])
    if type(value) is dict:  # which may be the caller's own
        return {name: _with(item, old, new) for name, item in value.items()}
    if isinstance(value, Mapping):  # what a model of transformers returns
        for name, item in value.items():
            if item is old:
                value[name] = new  # pyright: ignore
    return value


_numbers = itertools.count()
_HOOKS: WeakValueDictionary[int, Hook] = WeakValueDictionary()


def _run(x: Value, y: Value, key: torch.Tensor) -> None:
    """Run the operator ``visit``, where compiled code comes to it."""
    number, kind = divmod(int(key), 3)
    if (hook := _HOOKS.get(number * 3)) is None or hook.visitor is None:
        return
    hook.compiled = True
    with torch.no_grad():
        if kind:
            assert y is not None
            hook.visitor.visit_gradient(hook, y, of_input=kind == 1)
        else:
            hook.visitor.visit(hook, x, y, compiled=True)


_LIBRARY = torch.library.Library("stabilitylab", "DEF")
_LIBRARY.define("visit(Tensor? x, Tensor? y, Tensor key) -> ()", tags=[torch.Tag.pt2_compliant_tag])
_LIBRARY.impl("visit", _run, "CompositeExplicitAutograd")
torch.library.register_fake("stabilitylab::visit", lambda x, y, key: None, lib=_LIBRARY)
_visit: Any = torch.ops.stabilitylab.visit.default
_register_effectful_op(_visit, _EffectType.ORDERED)
_LIBRARY.define("through(Tensor value, Tensor key, bool parts) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
_LIBRARY.impl("through", lambda value, *rest: value.clone(), "CompositeExplicitAutograd")


def not_copied(operator: Any, value: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor like the one that an operator hands on, for compilers. The first time that inductor asks,
    it is told that it need not copy."""
    if (lowering := sys.modules.get("torch._inductor.lowering")) is not None and operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(lambda value, *rest: value)
    return torch.empty_like(value)


torch.library.register_fake("stabilitylab::through", lambda value, *rest: not_copied(_through, value), lib=_LIBRARY)
_through: Any = torch.ops.stabilitylab.through.default


def _keep_key(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, bool], output: torch.Tensor) -> None:
    _, key, ctx.parts = inputs
    ctx.save_for_backward(key)


def _visit_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (key,) = ctx.saved_tensors
    _visit(None, gradient.sum(0) if ctx.parts else gradient, key)
    return gradient, None, None


torch.library.register_autograd("stabilitylab::through", _visit_gradient, setup_context=_keep_key, lib=_LIBRARY)


def _measure(hook: Hook, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
    if hook.visitor is None:
        return
    try:
        entering, leaving = _values(hook, args, kwargs, output)
    except Exception as error:  # of the caller's classes: training goes on
        hook.visitor.give_up(hook, error)
    else:
        hook.visitor.visit(hook, entering, leaving)


def _values(hook: Hook, args: Any, kwargs: Mapping[str, Any], output: Any) -> tuple[Value | Parts, Value | Parts]:
    """Return the values that enter and leave a module in a call."""
    if hook.in_parts(output):
        entering = _first(args, kwargs)
        left = parts_of(output, hook.shown)
        return left if entering is output else parts_of(entering, hook.shown), left
    if hook.streams:
        return taken_up(args, kwargs, hook.streams), summed(output)
    entering, leaving = hook.chosen(args, kwargs), tensor_of(output)
    if not hook.layer_of or hook.visitor is None:
        return entering, leaving
    is_sure = leaving is output
    if not is_sure and not hook.has_written(leaving):
        entering, leaving, is_sure = through_layer(args, kwargs, output, entering)
    if is_sure and leaving is not None:
        hook.visitor.returned[hook.layer_of] = ref(leaving)
    else:
        hook.visitor.returned.pop(hook.layer_of, None)
    return entering, leaving


def _at_once(call: Callable[..., None], *args: Any) -> None:
    call(*args)


_apart = _at_once  # without compiling what is called
# The callback that compiles Python functions which run now beside compiled code, as hooks of a compiled module do.
_frames: Any = getattr(torch._C, "_dynamo").eval_frame  # noqa: B009 (the stubs do not know it)
_callback: Callable[[], Any] = getattr(_frames, "get_eval_frame_callback", lambda: None)


def keep_apart() -> None:
    """Keep hooks that run beside compiled code, those of a compiled module itself, from becoming graphs of their own.
    Inside compiled code they remain part of its graph."""
    global _apart
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.eval_frame import skip_code

        _apart = torch.compiler.disable(_at_once) if _apart is _at_once else _apart
        for kind in (Hook, EntryHook, RootHook, NotingHook):
            skip_code(kind.__call__.__code__)


def forget_compiled() -> bool:
    """Make all compiled code of this process be compiled anew at its next call, since hooks that come after the first
    call are passed over in silence. Return False if there is none."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo import convert_frame

    if not convert_frame.input_codes.seen:
        return False
    torch.compiler.reset()
    return True
