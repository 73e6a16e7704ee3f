"""``sweep``: the runs that a figure needs, or any grid, one process a run."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from ..errors import UsageError
from ..printable import screen
from ._options import QUIET, RUNS, VERBOSE, given_flags
from .base import command

if TYPE_CHECKING:
    from ..experiments import Experiment
    from ..sweep import Job, Ledger


@command("sweep", rank=30)
def sweep(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Figures (branchnorm:8, ...), 'table' (the stability table), or with --grid axes: "
            "arch=deepnorm,branchnorm seed=0..4"
        ),
    ] = None,
    scale: Annotated[
        Literal["tiny", "h200", "paper"],
        typer.Option(help="Size of the runs: 64-128-2 on a CPU, half an hour of one GPU, or the papers' sizes."),
    ] = "tiny",
    grid: Annotated[bool, typer.Option("--grid", help="The arguments are axes of a grid.")] = False,
    choose_rate: Annotated[
        bool,
        typer.Option(
            "--choose-rate",
            help="With --grid: search the learning rate of each point on its own schedule. The axes lr and seed give "
            "the first rates and the seeds. An encoder-decoder must read its source; exit code 1 if a point has no "
            "eligible rate.",
        ),
    ] = False,
    data: Annotated[str | None, typer.Option(help="As for 'probe'.", show_default="synthetic")] = None,
    valid: Annotated[str | None, typer.Option(help="As for 'probe'.")] = None,
    archs: Annotated[
        str | None, typer.Option(help="For the table: names, comma separated, or all.", show_default="all")
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="For the table: encoder and decoder layers together.", show_default="12,36,100")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Other seeds than the figure's: 3..5 or 3,4; for the table also their number, from 3 on."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Updates of a grid's runs (by preset), or of branchnorm:8 at scale h200 (2000)."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device of all runs: auto, cpu, cuda or cuda:N.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Stop all runs at a checkpoint after so many minutes; the same command continues."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of run directories.")] = RUNS,
    ledger: Annotated[
        Path | None, typer.Option(help="A CSV file to commit: finished runs are added, and runs in it are skipped.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="1; of a Slurm array all")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="New attempts of a run that failed.")] = 1,
    launcher: Annotated[
        Literal["local", "slurm-array", "parsl"],
        typer.Option(
            help="slurm-array: submit one array and return; parsl: use your own executors (pip install "
            "'stabilitylab\\[sweep]')."  # without the backslash rich takes the word in brackets for a style
        ),
    ] = "local",
    sbatch: Annotated[
        str | None, typer.Option(help="Options of sbatch for a Slurm array, such as '--gpus=1 --time=4:00:00'.")
    ] = None,
    parsl_config: Annotated[Path | None, typer.Option(help="Python file that defines parsl's config.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Devices to spread runs over, such as 0,1,2,3.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="For the table or a grid: a setting of all runs."),
    ] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the commands, for a scheduler of your own.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Print which runs are done; start nothing.")] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Make the runs that figures, the stability table or a grid need; finished runs are skipped, interrupted ones go
    on."""
    from .. import experiments
    from .. import sweep as sweeping
    from ..config import merge, parse_set
    from . import _rate_choice
    from . import _stability as stability

    if not what:
        raise UsageError("name a figure, such as 'sweep branchnorm:8', or axes: sweep --grid arch=deepnorm seed=0..4.")
    kept = None if ledger is None else sweeping.Ledger(ledger)
    source = given_flags({"source": data, "valid": valid})
    if choose_rate:
        if not grid or print_ or status or launcher != "local" or minutes is not None or seeds is not None:
            raise UsageError(
                "--choose-rate goes with --grid, and without --print, --status, --launcher, --minutes and --seeds "
                "(give seeds as an axis)."
            )
        settings = merge(parse_set(set_ or ()), {"data": source, "train": given_flags({"steps": steps})})
        return _rate_choice.choose(what, settings, device, out, kept, jobs or 1, quiet)
    table = not grid and {*map(experiments.SWEEPS.resolve, what)} == {stability.TABLE}
    if table:
        planned = [stability.planned(scale, source, set_ or (), archs, depths, seeds, steps, device, out, kept)]
    else:
        if archs is not None or depths is not None:
            raise UsageError("--archs and --depths go with 'sweep table': other figures and grids name their own.")
        planned = _planned(what, scale, grid, source, seeds, steps, set_ or (), device, out, kept)
    until = None if minutes is None else time.monotonic() + 60 * minutes
    if sbatch is not None and launcher != "slurm-array":
        raise UsageError("--sbatch goes with --launcher slurm-array.")
    if print_:
        _show_skipped([job for jobs_of_one in planned for job in jobs_of_one if job.cell is not None], kept)
        for line in (line for jobs_of_one in planned for line in sweeping.commands(jobs_of_one)):
            print(line)
        return 0
    if status:
        _show([row for jobs_of_one in planned for row in sweeping.status_table(jobs_of_one)])
        if table:
            stability.show(planned[0])
        return 0
    if launcher == "slurm-array":
        if gpus or parsl_config is not None or minutes is not None:
            raise UsageError("--gpus, --parsl-config and --minutes do not go with a Slurm array: use --sbatch.")
        return _submit(planned, sbatch, jobs)
    if scale == "tiny" and not grid and not quiet:
        asked = {figure: experiments.minutes(figure) for figure in what}
        if table:
            asked = {"the table, at 64-128-2": stability.minutes(planned[0])}
        print(_cost(asked), file=sys.stderr)
    worst = 0
    for jobs_of_one in planned:
        with sweeping.Display(screen(stderr=True), quiet) as display:
            outcome = sweeping.run(
                jobs_of_one,
                workers=jobs or 1,
                launcher=launcher,
                retries=retries,
                audience=display,
                gpus=tuple(gpus.split(",")) if gpus else (),
                parsl_config=parsl_config,
                until=until,
            )
        print(f"{jobs_of_one[0].out}: {outcome.sentence()}")
        worst = max(worst, outcome.exit_code)
        if outcome.signal is not None:
            break
    if table:
        stability.show(planned[0])
    return worst


def _cost(asked: Mapping[str, float | None]) -> str:
    """Return the cost in words, such as ``about 16 core-minutes for 3``, and say so if it was never measured."""
    known = [f"{cost:g} core-minutes for {name}" for name, cost in asked.items() if cost is not None]
    others = [name for name, cost in asked.items() if cost is None]
    words = [f"about {', '.join(known)}"] if known else []
    return "; ".join([*words, *([f"how long {' and '.join(others)} takes is unknown"] if others else [])])


def _submit(planned: Sequence[list[Job]], sbatch: str | None, at_once: int | None) -> int:
    from .. import sweep as sweeping

    try:
        options = shlex.split(sbatch or "")
    except ValueError as error:
        raise UsageError(f"--sbatch cannot be cut into words ({error}): close its quotes.") from error
    for jobs_of_one in planned:
        done = sweeping.submit(jobs_of_one, options, at_once)
        for one in done:
            print(f"{jobs_of_one[0].out}: {one.sentence()}")
        if not done:
            print(f"{jobs_of_one[0].out}: {sweeping.Outcome(jobs_of_one).sentence()}; nothing was submitted")
    return 0


def _planned(
    what: list[str],
    scale: str,
    grid: bool,
    data: dict[str, str],
    seeds: str | None,
    steps: int | None,
    set_: Any,
    device: str | None,
    out: Path,
    ledger: Ledger | None,
) -> list[list[Job]]:
    """Return the jobs of each figure, or of the grid; runs that several figures share come once."""
    from .. import sweep as sweeping
    from ..config import merge, parse_set
    from ..experiments import SWEEPS, experiments, folder, on_device
    from ._stability import TABLE, seeds_of

    if grid:
        if seeds is not None:
            raise UsageError("--seeds goes with figures: in a grid seeds are an axis, such as seed=3..5.")
        updates = given_flags({"steps": steps})
        if updates and any(axis.partition("=")[0].strip() in ("steps", "train.steps") for axis in what):
            raise UsageError(f"--steps {steps} and an axis of steps exclude each other: leave out one of them.")
        own = sweeping.grid(what, merge(parse_set(set_), {"data": data, "train": updates}))
        return [sweeping.plan(on_device(own, device), out, ledger)]
    if set_:
        raise UsageError(
            "--set goes with --grid or with 'sweep table' alone: what a figure needs is fixed, so that its runs can be "
            "compared."
        )
    if seeds is not None and seeds.isdigit() and TABLE in map(SWEEPS.resolve, what):
        raise UsageError(f"--seeds {seeds} is a count to the table and a seed to a figure: give them as 3..5 or 3,4.")
    found: dict[Path, dict[str, Experiment]] = {}
    for figure in what:
        wanted = experiments(figure, scale, data=data or None, seeds=seeds_of(seeds), steps=steps)
        found.setdefault(out / folder(figure, scale), {}).update({one.name: one for one in on_device(wanted, device)})
    return [sweeping.plan(wanted.values(), path, ledger) for path, wanted in found.items()]


def _show_skipped(jobs: Sequence[Job], ledger: Ledger | None) -> None:
    """Print the skipped jobs on stderr, since --print prints the commands of the others on stdout."""
    if jobs and ledger is not None:
        names = ", ".join(job.name for job in jobs)
        print(
            f"{len(jobs)} skipped, since {ledger.path} has {'it' if len(jobs) == 1 else 'them'}: {names}",
            file=sys.stderr,
        )


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(str(column))
    for row in rows:
        table.add_row(*map(str, row.values()))
    screen(piped=160).print(table)
