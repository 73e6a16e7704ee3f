"""``check``: a check of the user's own model before training."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from ..errors import UsageError
from ._factory import GIVES, OF_LR_FIND, made_by, named
from ._options import JSON, VERBOSE
from .base import command


@command("check", rank=20)
def check(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY",
            help=f"A function that returns {GIVES.format(takes='preflight')}; with --neutral, (model, update).",
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Show every layer, not only the ends of long stacks.")] = False,
    neutral: Annotated[
        bool, typer.Option("--neutral", help="Verify that watching changes no bit: two runs unwatched, one watched.")
    ] = False,
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of each run of --neutral; 3 if left out.")] = None,
    json_: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Check a model before training: one step of a copy against stated bounds, and questions about the whole model.

    The questions: the loss at the start against a guess, the change of the output by the first update, leaks from later
    inputs or other samples, the shift of the labels, copied units, and parameters that training does not reach.

    Exit code 1 if a bound of the kind FAIL is broken. It was broken in 1 of 30 healthy small models and in 12 of 12
    with a fault (docs/preflight.md): what a first step shows is not how training ends.

    With --neutral: exit code 0 neutral, 1 not neutral, 5 not decidable here, where two unwatched runs differ
    (docs/neutral.md).
    """
    from ..store.layout import plain

    if neutral:
        from ..check import verify_neutral

        if every:
            raise UsageError("--all shows layers, of which --neutral has none: leave one of the two out.")
        found = verify_neutral(named(factory, "check"), updates or 3)
        print(json.dumps(plain(found.as_dict())) if json_ else found)
        if found.exit_code:
            raise typer.Exit(found.exit_code)
        return
    if updates is not None:
        raise UsageError("--updates belongs to --neutral: leave it out, or add --neutral.")
    from ..check import preflight

    result = preflight(**made_by(factory, "check", "preflight", inspect.signature(preflight).parameters, OF_LR_FIND))
    print(json.dumps(plain(result.as_dict())) if json_ else result.text(every))
    if not result.ok:
        raise typer.Exit(1)
