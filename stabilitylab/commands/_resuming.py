"""``probe --resume auto``: start the run, continue it, or report that it has ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from ..config import Config
from ..errors import DivergedError, UsageError
from ..experiments import Experiment
from ..store import Run
from ..sweep import Job, examine, make_way


def found(config: Config, out: Path, name: str | None) -> Job:
    """Return the run of that name, or of the automatic name, with its state. A run that cannot be continued is moved
    aside first.

    Raises UsageError if its directory holds another configuration, or if another process writes it, and InputError if
    its data have changed.
    """
    from .. import train
    from ..probes.parameters.ranks import from_first_rank, on_first_rank

    train.join(config)
    experiment = Experiment(name or train.automatic_name(config), config)

    def look() -> Job:
        job = examine(experiment, out)
        if job.state == "running":
            raise UsageError(f"{job.path} is being written by another process: wait for it to end.")
        make_way(job)
        return job

    return cast(Job, from_first_rank(on_first_rank(look)))


def say_ended(path: Path, fail: bool, as_json: bool, quiet: bool) -> int:
    """Print the path of a run that had ended before, say that there is nothing to do, and return the exit code."""
    from ..probes.parameters.ranks import is_first_rank
    from ._outcome import print_outcome

    if not is_first_rank():
        return 0
    run = Run.open(path)
    status = run.status
    if as_json:
        verdict = run.verdict
        print_outcome(run, status.state, status.step, verdict.recorded() if verdict else None)
    else:
        if not quiet:
            print(f"nothing to do: {path} has ended already, {status.state} at step {status.step}", file=sys.stderr)
        print(path)
    if fail and status.state == "diverged":
        raise DivergedError(f"the run diverged: {status.reason} ({path}).")
    return 0
