"""``explain``: the cause of a trouble, by replaying a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..printable import screen
from ._factory import OF_CHECK, called
from ._options import JSON, VERBOSE, print_json
from .base import command

if TYPE_CHECKING:
    from ..store import Run

TAKES = ("model", "loss_fn", "optimizer", "scaler", "scheduler", "clip")
OTHERS = ("batch", "batches", "held_out", *OF_CHECK)


@command("explain", rank=95)
def explain(
    run: Annotated[
        Path,
        typer.Argument(help="Run directory of 'probe --record' or of watch(record=Recorder(...)).", show_default=False),
    ],
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FUNCTION",
            help="A function that returns (model, batch, loss_fn, optimizer), or a dict of model, loss_fn, optimizer "
            "and, if they were declared, scaler, scheduler and clip. Runs of 'probe' need no function.",
        ),
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Only replay and check; try no intervention.")] = False,
    updates: Annotated[int, typer.Option(min=1, help="The most updates that the audit replays.")] = 400,
    as_json: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Explain a trouble by experiment: replay the recorded updates, and change one thing at a time.

    The recorded updates are done again from a snapshot. If a bit differs, the loop did something there that it did not
    declare: this is a finding. Then the suspects are undone one at a time. A suspect is called the cause only if the
    harm then stays away in six of six repeats, and if no harmless change does the same. The run is not changed. For a
    run of watch() without --factory, the answer has only the facts of its ledger. Explain a run of several processes
    under torchrun, with the same number of processes.

    Exit code 0 without a finding or lasting harm, 1 with a finding, a trouble that lasted or a run that diverged, 4 for
    a run that was not recorded or cannot be replayed.
    """
    from ..explain.explanation import explain as explained
    from ..probes.parameters.ranks import is_first_rank
    from ..store import Run

    opened = Run.open(run)
    given = _from_factory(factory) if factory else _of_probe(opened)
    console = screen(stderr=True)
    found = explained(
        opened,
        **given,
        audit=audit,
        updates=updates,
        progress=lambda sentence: is_first_rank() and console.print(f"{run}: {sentence}"),
    )
    if not is_first_rank():
        return found.exit_code
    if as_json:
        print_json(found.as_dict())
    else:
        answer = screen(piped=10_000)
        answer.print(f"{run}: {found}")
    return found.exit_code


def _of_probe(run: Run) -> Mapping[str, Any]:
    """Return the objects of a run of ``probe``; {} for a run of watch(), whose model only its user knows."""
    if run.manifest.get("kind") == "watched" or "data" not in run.manifest:
        return {}
    from ..train.recording import replayed

    return replayed(run.manifest)


def _from_factory(factory: str) -> Mapping[str, Any]:
    given = called(factory, "explain")
    if isinstance(given, tuple) and len(given) == 4:
        given = dict(zip(("model", "batch", "loss_fn", "optimizer"), given, strict=True))
    if not isinstance(given, Mapping) or not {"model", "loss_fn", "optimizer"} <= set(given):
        raise UsageError(
            f"{factory} must return (model, batch, loss_fn, optimizer), or a dict of {', '.join(TAKES)}, the "
            "last three only if they were declared."
        )
    if foreign := sorted(set(given) - {*TAKES, *OTHERS}):
        known = ", ".join(TAKES)
        raise UsageError(f"{factory} returned {foreign[0]!r}, which explain does not take: it takes {known}.")
    made = {key: value for key, value in given.items() if key in TAKES}
    if callable(made["optimizer"]) and not hasattr(made["optimizer"], "param_groups"):
        made["optimizer"] = made["optimizer"](made["model"].parameters())
    return made
