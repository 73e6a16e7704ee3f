"""The moments at which an optimizer begins to change parameters, and at which it has stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def before_step(optimizer: Any, look: Callable[[], object]) -> Any:
    """Call ``look`` in each step of an optimizer, or of the one that it wraps as Accelerate's does, before parameters
    change; return the handle that ends this.

    A step that is given a closure (Lightning, L-BFGS) computes gradients in it: ``look`` comes once it has returned for
    the first time.
    """

    def hook(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positional = args[1:2]  # behind the optimizer itself
        closure = kwargs.get("closure", positional[0] if positional else None)
        if not callable(closure):  # Sophia's and Polyak's steps take a number
            look()
            return None
        looked = False

        def looking() -> Any:
            nonlocal looked
            result = closure()
            if not looked:
                looked = True
                look()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looking}
        return (*args[:1], looking, *args[2:]), kwargs

    try:
        return optimizer.register_step_pre_hook(hook)
    except AttributeError:
        return optimizer.optimizer.register_step_pre_hook(hook)


def after_step(optimizer: Any, look: Callable[..., object]) -> Any:
    """Call ``look`` after each step of an optimizer, or of the one that it wraps as Accelerate's does; return the
    handle that ends this."""
    try:
        return optimizer.register_step_post_hook(look)
    except AttributeError:
        return optimizer.optimizer.register_step_post_hook(look)
