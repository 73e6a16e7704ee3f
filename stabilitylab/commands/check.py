"""``check``: before you train, on a model of your own."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from . import command
from ._factory import GIVES, made_by
from ._options import JSON, VERBOSE


@command("check", rank=20)
def check(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY", help=f"A function that returns {GIVES.format(takes='preflight')}."
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Show every layer, not the ends of long stacks alone.")] = False,
    json_: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Check a model before training: one step of a copy against stated bounds, and questions about the whole model.

    The questions: the loss at the start against a guess, the change of the output by the first update, leaks from later
    inputs or other samples, the shift of the labels, copied units, and parameters that training does not reach.

    Exit code 1 if a bound of the kind FAIL is broken. It was broken in 1 of 30 healthy small models and in 12 of 12
    with a fault (docs/preflight.md): what a first step shows is not how training ends.
    """
    from ..check import preflight
    from ..forecast.candidate import KEYS
    from ..store.layout import plain

    result = preflight(**made_by(factory, "check", "preflight", inspect.signature(preflight).parameters, KEYS))
    print(json.dumps(plain(result.as_dict())) if json_ else result.text(every))
    if not result.ok:
        raise typer.Exit(1)
