"""``stabilitylab.tap``: shows the probes a value that is neither input nor output of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_shown: Callable[[Any, str, Any, str], Any] | None = None  # set by the first watcher of the process


def tap(value: T, name: str, owner: Any = None, *, kind: str = "stream") -> T:
    """Return ``value`` unchanged, and make it a place that probes read.

    Use it for a value that is neither the input nor the output of a module (functional norms, parameters in the block),
    and go on with the returned value. The place is called ``name``, inside the module ``owner``. Without ``owner`` it
    is inside the innermost running module. Compiled code does not show which module runs, so write ``tap(x, "norm1",
    self)`` there. ``kind`` decides which tables read the value:

    - "stream": the residual stream, or the output of a sub-layer or a layer (residual_norm, activation_grad_norm,
      outliers)
    - "norms": the input of a norm (ln_input)
    - "activations": the input of the second linear of a feed-forward block (activation_sparsity, outliers)
    - "outputs": the output of a stack, F (model_update, output_norm)

    A tap costs nothing without a watcher. Places are known from the first row on. A place that first appears later is
    named in a warning and not recorded.
    """
    return value if _shown is None else _shown(value, name, owner, kind)


def hand_to(shown: Callable[[Any, str, Any, str], Any]) -> None:
    """Pass every value to ``shown`` from now on."""
    global _shown
    _shown = shown


def mentioned(function: Any, holder: type, seen: set[Any] | None = None) -> bool:
    """True if the code of a method of ``holder``, or a function of its own module that it calls by name, calls
    :func:`tap`."""
    seen = set() if seen is None else seen
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    if "tap" in code.co_names:
        return True
    called = [function.__globals__.get(name, getattr(holder, name, None)) for name in code.co_names]
    own = [each for each in called if getattr(each, "__module__", None) == function.__module__]
    return tap in [each for each in called if callable(each)] or any(mentioned(each, holder, seen) for each in own)
