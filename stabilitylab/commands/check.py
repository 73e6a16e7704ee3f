"""``check``: a check of the user's own model before training."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..printable import screen
from ._factory import GIVES, OF_LR_FIND, made_by, named
from ._options import JSON, VERBOSE, print_json
from .base import command

if TYPE_CHECKING:
    from ..check import RankCheck


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

    Under torchrun, with a function that joins the process group and returns what its rank trains: questions about the
    processes instead, such as copies that differ, ranks that share a batch, and gradients off by the number of ranks.
    They found 23 of 25 published bugs and accused none of 30 correct set-ups (docs/setups.md).

    With --neutral: exit code 0 neutral, 1 not neutral, 5 not decidable here, where two unwatched runs differ
    (docs/neutral.md).
    """
    if neutral:
        from ..check import verify_neutral

        if every:
            raise UsageError("--all shows layers, of which --neutral has none: leave one of the two out.")
        found = verify_neutral(named(factory, "check"), updates or 3)
        if json_:
            print_json(found.as_dict(), indent=None)
        else:
            print(found)
        if found.exit_code:
            raise typer.Exit(found.exit_code)
        return
    if updates is not None:
        raise UsageError("--updates belongs to --neutral: leave it out, or add --neutral.")
    from ..check import check_ranks, preflight
    from ..check.questions import NAMES
    from ..check.ranks import NAMES as OF_RANKS
    from ..probes.parameters.ranks import on_first_rank

    keys = [inspect.signature(function).parameters for function in (preflight, check_ranks)]
    given = made_by(factory, "check", "preflight", list(dict.fromkeys([*keys[0], *keys[1]])), OF_LR_FIND)
    if _is_of_several(factory):
        if every:
            raise UsageError("--all shows layers, of which a check of several processes has none: leave it out.")
        found = check_ranks(**_arguments(given, keys[1], {*NAMES} - {*OF_RANKS}))
        # all ranks wait until rank 0 has printed: torchrun ends all of them once one ends with a code other than 0
        on_first_rank(lambda: _shown(found, json_))
    else:
        found = preflight(**_arguments(given, keys[0], {*OF_RANKS} - {*NAMES}))
        if json_:
            print_json(found.as_dict(), indent=None)
        else:
            print(found.text(every))
    if not found.ok:
        raise typer.Exit(1)


def _shown(found: RankCheck, json_: bool) -> None:
    """Print the result, and flush stdout."""
    if json_:
        print_json(found.as_dict(), indent=None)
    else:
        console = screen(piped=10_000)
        console.print(str(found))
    sys.stdout.flush()


def _arguments(given: Mapping[str, Any], keys: Collection[str], foreign: Collection[str]) -> dict[str, Any]:
    """Return the arguments that a check takes: one factory serves both checks. ``foreign``: the names in ``skip`` that
    are questions of the other check."""
    own = {key: value for key, value in given.items() if key in keys}
    if "skip" in own:
        own["skip"] = [name for name in own["skip"] if name not in foreign]
    if not isinstance(own.get("batches", ()), Sequence):  # lr-find also takes a loader or a function
        del own["batches"]
    return own


def _is_of_several(factory: str) -> bool:
    """True if the factory has joined a process group of several processes. Raises UsageError if torchrun started
    several processes and the factory has joined no group."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    started = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_available() and dist.is_torchelastic_launched() else 1
    if started > 1:
        raise UsageError(
            f"torchrun started {started} processes, and {factory} joined no process group: let {factory} call "
            "torch.distributed.init_process_group first, and return what each rank trains."
        )
    return False
