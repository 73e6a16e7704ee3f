"""The user's update function: its argument in place of a watcher, and the optimizers that it steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..api import RunWatcher
from ..errors import UsageError, in_words
from ..lr_find.subject import made_for

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Callable[[Any], Any] | None
ONE_OR_SEVERAL = "give a torch optimizer, a list of several, or a function that makes one or several"
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ALONE = (
    "an update ended and no optimizer of torch had stepped: let the update function take the watcher and call its "
    "step(loss=loss) after backward."
)
NEVER = (
    "the update function never called step(loss=loss) of the watcher that it is given: call it after backward, before "
    "the optimizer's step."
)


class Steps:
    """The argument of an update function, in place of the watcher: the watcher's ``step`` and ``note``, or nothing."""

    def __init__(self, watcher: RunWatcher | None = None) -> None:
        self.watcher = watcher
        self.count = 0
        self.losses: list[Any] = []

    def step(self, loss: Any = None, **metrics: Any) -> Mapping[str, float | None]:
        """End a row of the watched run; do nothing in the other runs."""
        self.count += 1
        self.losses.append(loss)
        return {} if self.watcher is None else self.watcher.step(loss=loss, **metrics)

    def note(self, **metrics: Any) -> None:
        """Add metrics to the row of the watched run."""
        if self.watcher is not None:
            self.watcher.note(**metrics)


@contextmanager
def stepping(
    update: Callable[..., Any], steps: Steps, optimizers: list[torch.optim.Optimizer]
) -> Iterator[Callable[[], list[Any]]]:
    """Yield a function that does one update and returns its losses.

    An update function without parameters calls ``steps.step`` when its first optimizer steps. Every optimizer of
    torch's that steps is added to ``optimizers``. Raises UsageError for an update without a step.
    """
    alone = not takes_watcher(update)
    begun = False

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal begun
        if alone and not begun:
            begun = True
            steps.step()

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if all(optimizer is not known for known in optimizers):
            optimizers.append(optimizer)

    def once() -> list[Any]:
        nonlocal begun
        begun, steps.losses, steps.count = False, [], 0
        returned = update() if alone else update(steps)
        if not steps.count:
            raise UsageError(ALONE if alone else NEVER)
        return [returned, *steps.losses]

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield once
    finally:
        for handle in handles:
            handle.remove()


def takes_watcher(update: Callable[..., Any]) -> bool:
    """True if the function must be given an argument; raises UsageError if it must be given several."""
    try:
        parameters = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [each for each in parameters if each.default is each.empty and each.kind not in VARIABLE]
    if len(needed) > 1:
        raise UsageError(f"the update function takes {len(needed)} arguments: it must take the watcher, or nothing.")
    return bool(needed)


def optimizers_of(update: Any, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the model's parameters that the function refers to."""
    own = {id(parameter) for parameter in model.parameters()}
    found = [each for each in _reached(update) if isinstance(each, torch.optim.Optimizer)]
    return [
        each
        for number, each in enumerate(found)
        if all(each is not other for other in found[:number])
        and all(id(parameter) in own for group in each.param_groups for parameter in group["params"])
    ]


def is_maker(given: Any) -> bool:
    """Return True for a function that makes optimizers."""
    return callable(given) and not hasattr(given, "param_groups")


def optimizers_given(given: Given, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of an argument ``optimizer``: none, one, several, or those that a function makes.

    The function is called with the model if its first argument is called ``model``, otherwise with the model's
    parameters. Raises UsageError if the function fails or if something is no optimizer.
    """
    if given is None:
        return []
    made: Any = _made_by(given, model) if is_maker(given) else given
    several: list[Any] = list(made) if isinstance(made, (list, tuple)) else [made]
    what = "optimizer" if made is given else "the result of the function that makes the optimizer"
    if not several:
        raise UsageError(f"{what} is empty: {ONE_OR_SEVERAL}.")
    for one in several:
        if not hasattr(one, "param_groups"):
            holds = "is" if one is made else "holds"
            kind = "a function" if callable(one) else type(one).__name__
            raise UsageError(f"{what} {holds} {kind}: {ONE_OR_SEVERAL}.")
    return several


def named_once(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return the name of each optimizer: its class, with a number if several have that class."""
    kinds = [type(one).__name__ for one in optimizers]
    return [f"{kind} {kinds[: at + 1].count(kind)}" if kinds.count(kind) > 1 else kind for at, kind in enumerate(kinds)]


def _made_by(function: Any, model: nn.Module) -> Any:
    try:
        return made_for(function, model)
    except Exception as error:
        raise UsageError(f"the function that makes the optimizer failed: {in_words(error)}.") from error


def _reached(update: Any) -> Iterator[Any]:
    """Yield the objects that a function holds: closure, defaults, bound object, arguments of a partial; one list or
    dict deep."""
    if isinstance(update, functools.partial):
        yield from _with_entries([*update.args, *update.keywords.values()])
        yield from _reached(update.func)
        return
    holder = getattr(update, "__self__", None)
    if holder is None and not inspect.isfunction(update):
        holder = update  # an object with __call__
    yield from _with_entries(list(getattr(holder, "__dict__", {}).values()))
    function = getattr(update, "__func__", update)
    cells = getattr(function, "__closure__", None) or ()
    held = []
    for cell in cells:
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    yield from _with_entries([*held, *(getattr(function, "__defaults__", None) or ())])
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    yield from _with_entries([function.__globals__[name] for name in names if name in function.__globals__])


def _with_entries(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()
