"""``fingerprint``: the sums of one row of a run in a file that a repository can keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._options import VERBOSE
from .base import command


@command("fingerprint", rank=106)
def fingerprint(
    run: Annotated[Path, typer.Argument(help="Run directory with the probe 'fingerprint'.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The JSON file to write; it must not exist.")] = Path("golden.json"),
    step: Annotated[int | None, typer.Option(min=0, help="The step of the row.", show_default="the first")] = None,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Keep the fingerprint of one row of a run in a file, with which 'bisect' compares later runs.

    The file holds 16 sums for each place and no parameter, activation or text. 'bisect golden.json RUN' ends with exit
    code 1 if RUN computes something else.
    """
    from ..bisect.prints import of_run, steps_of
    from ..errors import InputError, UsageError
    from ..store import Run

    if out.exists():
        raise UsageError(f"{out} exists: remove it, or give another --out.")
    opened = Run.open(run)
    found = of_run(opened, steps_of(opened)[0] if step is None else step)
    try:
        found.save(out)
    except OSError as error:
        raise InputError(f"cannot write {out} ({error.strerror or error}): check the path of --out.") from error
    print(f"{out}: {found.count} places of {run} at step {found.step}")
