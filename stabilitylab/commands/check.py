"""``check``: before you train, on a model of your own."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..errors import InputError, StabilityLabError, UsageError
from . import command
from ._options import JSON, VERBOSE

GIVES = "(model, batch, loss_fn) or (model, batch, loss_fn, optimizer), or a dict of preflight's arguments"


@command("check", rank=20)
def check(
    factory: Annotated[
        str,
        typer.Argument(metavar="PACKAGE.MODULE:FACTORY", help=f"A function that returns {GIVES}."),
    ],
    every: Annotated[bool, typer.Option("--all", help="Show every layer, not the ends of long stacks alone.")] = False,
    json_: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Check a model before training: one step of a copy, layer by layer, against stated bounds.

    Exit code 1 if a bound of the kind FAIL is broken.
    """
    from ..check import preflight
    from ..store.layout import plain

    result = preflight(**_arguments(factory))
    print(json.dumps(plain(result.as_dict())) if json_ else result.text(every))
    if not result.ok:
        raise typer.Exit(1)


def _arguments(factory: str) -> Mapping[str, Any]:
    name, colon, attribute = factory.partition(":")
    if not (name and colon and attribute):
        raise UsageError(f"{factory!r} must be PACKAGE.MODULE:FACTORY, such as mymodels.small:ready.")
    sys.path.insert(0, "")  # as `python -m` does: what lies in this folder
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"; it imports {error.name!r}, which is missing" if error.name not in name.split(".") else ""
        raise InputError(f"no module {name!r} here{missing}: call check in the folder that holds it.") from error
    except StabilityLabError:
        raise
    except Exception as error:
        raise InputError(f"importing {name} failed: {type(error).__name__}: {error} (-v shows where).") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UsageError(f"{name} has no function {attribute!r}; it has {known or 'none'}.")
    try:
        given = function()
    except StabilityLabError:
        raise
    except Exception as error:
        raise InputError(f"{factory} failed: {type(error).__name__}: {error} (-v shows where).") from error
    if isinstance(given, tuple) and len(given) in (3, 4):
        return dict(zip(("model", "batch", "loss_fn", "optimizer"), given, strict=False))
    if isinstance(given, Mapping) and {"model", "batch", "loss_fn"} <= set(given):
        from ..check import preflight

        if foreign := sorted(set(given) - set(inspect.signature(preflight).parameters)):
            raise UsageError(f"{factory} returned {foreign[0]!r}, which is no argument of preflight.")
        return given
    raise UsageError(f"{factory} returned {type(given).__name__}: it must return {GIVES}.")
