"""The user's function, named as PACKAGE.MODULE:FACTORY, and the model that it returns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import InputError, StabilityLabError, UsageError, meant

# the keys that a function may return for lr-find, and further keys of preflight and check_ranks, which lr-find ignores
OF_LR_FIND = (
    *("model", "batch", "loss_fn", "optimizer", "batches", "held_out", "clipping", "schedule", "warmup", "precision"),
)
OF_CHECK = (
    *("classes", "causal", "batch_first", "skip", "mask", "sites", "output_site"),
    *("after_backward", "evaluate", "share"),  # under torchrun
)
GIVES = "(model, batch, loss_fn) or (model, batch, loss_fn, optimizer), or a dict of {takes}'s arguments"


def made_by(
    factory: str,
    command: str,
    takes: str,
    arguments: Collection[str],
    others: Collection[str],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """Call ``factory`` for a command, with ``options``; a tuple of three or four becomes a dict. ``arguments`` of
    ``takes``: the allowed keys; ``others``: keys that are left out, since one function serves several commands. A
    function that returns ``batches`` alone gives the first of them as its ``batch``."""
    given = called(factory, command, options)
    if isinstance(given, tuple) and len(given) in (3, 4):
        return dict(zip(("model", "batch", "loss_fn", "optimizer"), given, strict=False))
    if isinstance(given, Mapping) and "batch" not in given and isinstance(given.get("batches"), Sequence):
        given = {**given, "batch": next(iter(given["batches"]), None)}
    if isinstance(given, Mapping) and {"model", "batch", "loss_fn"} <= set(given):
        if foreign := sorted(set(given) - {*arguments, *others}):
            known = ", ".join(sorted(arguments))
            raise UsageError(f"{factory} returned {foreign[0]!r}, which is no argument of {takes}: it takes {known}.")
        return {key: value for key, value in given.items() if key in arguments}
    gives = GIVES.format(takes=takes)
    raise UsageError(f"{factory} returned {type(given).__name__}: it must return {gives}.")


def called(factory: str, command: str, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Call the function that a command is given with ``options``, and return its result. Raises InputError if the
    function fails."""
    function = named(factory, command)
    try:
        return function(**options)
    except StabilityLabError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{factory} failed: {type(error).__name__}: {error} (-v shows where).") from error


def named(factory: str, command: str) -> Callable[..., Any]:
    """Import the function that a command is given as PACKAGE.MODULE:FACTORY. Raises UsageError for a wrong name,
    InputError if the module cannot be imported."""
    name, colon, attribute = factory.partition(":")
    if not (name and colon and attribute):
        raise UsageError(f"{factory!r} must be PACKAGE.MODULE:FACTORY, such as mymodels.small:ready.")
    if name.endswith(".py"):
        file = Path(name)
        if file.is_absolute():
            raise UsageError(f"{factory!r} names a file: go to {file.parent} and write {file.stem}:{attribute}.")
        module = ".".join(file.with_suffix("").parts)
        raise UsageError(f"{factory!r} names a file: write {module}:{attribute}.")
    sys.path.insert(0, "")  # as `python -m` does, so that modules of the current folder are found
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        parts = name.split(".")
        if error.name not in {".".join(parts[:n]) for n in range(1, len(parts) + 1)}:
            raise InputError(f"{name} imports {error.name!r}, which is not installed here: install it.") from error
        raise InputError(f"no module {name!r} here: call {command} in the folder that holds it.") from error
    except StabilityLabError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"importing {name} failed: {type(error).__name__}: {error} (-v shows where).") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if isfunction(value) and value.__module__ == name]
        hint = meant(attribute, known) or f" It has {', '.join(known) or 'none'}."
        raise UsageError(f"{name} has no function {attribute!r}.{hint}")
    return function
