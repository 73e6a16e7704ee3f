"""``stabilitylab.tap``: shows the probes a value that no module takes or yields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_shown: Callable[[Any, str, Any, str], Any] | None = None  # what the first watcher of the process puts here


def tap(value: T, name: str, owner: Any = None, *, kind: str = "stream") -> T:
    """Returns ``value`` unchanged, and makes it a place that probes see: where a model has no module whose input or
    output it is (functional norms, parameters in the block). Go on with what it returns.

    The place is called ``name``, inside the module ``owner``; of none the innermost that is running, which compiled
    code does not tell: say ``tap(x, "norm1", self)`` there. ``kind``, as what the tables take it:

    - "stream": the residual stream, or what a sub-layer or a layer yields (residual_norm, activation_grad_norm,
      outliers)
    - "norms": what enters a norm (ln_input)
    - "activations": what the second linear of a feed-forward block sees (activation_sparsity, outliers)
    - "outputs": the output of a stack, F (model_update, output_norm)

    Free where nobody watches. Places are known from the first row on; one that first comes by later is said by name and
    not recorded.
    """
    return value if _shown is None else _shown(value, name, owner, kind)


def hand_to(shown: Callable[[Any, str, Any, str], Any]) -> None:
    """From now on ``shown`` is told of every value."""
    global _shown
    _shown = shown


def mentioned(function: Any, holder: type, seen: set[Any] | None = None) -> bool:
    """Whether the code of a method of ``holder``, or of what it calls by name of its own module, calls :func:`tap`."""
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
