"""``sweep --choose-rate``: a search of the rate of every configuration of a grid, on the schedule of its run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import UsageError
from ..printable import screen
from ..store.layout import CHOICE, CHOICE_LEDGER

if TYPE_CHECKING:
    from ..experiments import Experiment
    from ..lr_find import Choice
    from ..sweep import Job, Ledger, Outcome

WORTH = "source worth"  # a column for models that have a source


def choose(
    axes: Sequence[str], settings: Mapping[str, Any], device: str | None, out: Path, ledger: Ledger | None, jobs: int,
    quiet: bool,
) -> int:  # fmt: skip
    """Search the rate of every point of the grid; returns the exit code."""
    from .. import sweep as sweeping
    from ..experiments import on_device, protocol

    bare, rates, seeds = _axes(axes, settings)
    points = on_device(sweeping.grid(bare, settings), device)
    ledger = ledger or sweeping.Ledger(out / CHOICE_LEDGER)
    confirming = range(max(seeds) + 1, max(seeds) + 1 + len(protocol.CONFIRMING_SEEDS))
    choices: dict[str, Choice] = {}
    for point in points:
        updates = point.config.train.steps
        if updates < 5:
            raise UsageError(f"{updates} updates are too few for a search: give --steps 5 or more, such as 6000.")
        first = max(1, round(protocol.RUNG_UPDATES / protocol.UPDATES * updates))
        rungs = sweeping.Rungs(rates, seeds, first=first, last=updates, confirming=confirming)
        trainer = sweeping.SweptTrainer(_without_seed(point), updates, out, ledger, _runner(jobs, quiet))
        if not quiet:
            least = len(seeds) * (len(rates) * first + 3 * updates - 2 * first) + len(confirming) * first
            print(f"{trainer.experiment.name}: the search takes {least:,} updates or more", file=sys.stderr)
        try:
            choices[trainer.experiment.name] = sweeping.choose_rate(trainer, rungs)
        except sweeping.Unfinished as stopped:
            print(f"{out}: {stopped}; run the same command again to continue.", file=sys.stderr)
            return stopped.outcome.exit_code
        trainer.discard()
        sweeping.write_table(out / CHOICE, choices)
    for name, choice in choices.items():
        _show(name, choice)
    print(f"all trials: {out / CHOICE}")
    return 0 if all(choice.rate is not None for choice in choices.values()) else 1


def _axes(axes: Sequence[str], settings: Mapping[str, Any]) -> tuple[list[str], tuple[float, ...], tuple[int, ...]]:
    """Take the axes of rates and seeds out of a grid, and return the others, the rates and the seeds."""
    from ..experiments import protocol
    from ..sweep.grids import axis

    found: dict[str, list[Any]] = {}
    bare = []
    for text in axes:
        key, values = axis(text)
        if key in ("lr", "seed"):
            found[key] = values
        else:
            bare.append(text)
    rates, seeds = (
        tuple(found.get(key, usual))
        for key, usual in (("lr", protocol.SEARCHED_RATES), ("seed", protocol.CHOICE_SEEDS))
    )
    if any(isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0 for rate in rates):
        raise UsageError(f"lr={','.join(map(str, rates))}: give learning rates that are all above 0.")
    if any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise UsageError(f"seed={','.join(map(str, seeds))}: give whole numbers from 0 on.")
    if "lr" in settings.get("train", {}):
        raise UsageError(
            "--choose-rate searches train.lr: leave it out of --set, and give the first rates as an axis lr=."
        )
    if not bare:
        raise UsageError("--choose-rate needs an axis beside rates and seeds, such as arch=deepnorm,branchnorm.")
    return bare, tuple(map(float, rates)), seeds


def _without_seed(point: Experiment) -> Experiment:
    from ..experiments import Experiment

    return Experiment(point.name.removesuffix(f"-s{point.config.train.seed}"), point.config)


def _runner(workers: int, quiet: bool) -> Any:
    """Return a function that runs jobs with the sweep's display."""

    def run(jobs: Sequence[Job]) -> Outcome:
        from .. import sweep as sweeping

        with sweeping.Display(screen(stderr=True), quiet) as display:
            return sweeping.run(jobs, workers=workers, audience=display)

    return run


def _show(name: str, choice: Choice) -> None:
    """Print the losses of a search by rate, mark the chosen rate, and print the notes about doubts."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", title_justify="left")
    columns = ["rate", "updates", "seeds", "loss [nats/token]", WORTH, "eligible", ""]
    lines = [dict(zip(columns, line, strict=True)) for line in _lines(choice)]
    if all(line[WORTH] == "-" for line in lines):
        columns.remove(WORTH)  # a model without a source
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "rate") else "right")
    for line in lines:
        table.add_row(*(line[column] for column in columns))
    rate = (
        f"the learning rate is {choice.rate:g}"
        if choice.rate
        else f"no rate is eligible (the lowest loss is at {choice.lowest:g})"
    )
    console = screen(piped=100)
    console.print(f"{name}: {rate}")
    console.print(table)
    for note in choice.notes:
        console.print(f"- {note}")
    console.print()


def _lines(choice: Choice) -> Iterator[tuple[str, ...]]:
    """Yield a line for every rate and rung, with the mean loss and the smallest source worth of its seeds."""
    groups: dict[tuple[float, int, bool], list[Any]] = {}
    searched = {trial.seed for trial in choice.results if trial.updates == max(t.updates for t in choice.results)}
    for trial, result in choice.results.items():
        groups.setdefault((trial.rate, trial.updates, trial.seed not in searched), []).append(result)
    for (rate, updates, confirms), results in sorted(groups.items()):
        worths = [result.source_worth for result in results if result.source_worth is not None]
        loss = sum(result.loss for result in results) / len(results)
        fit = sum(result.eligible for result in results)
        yield (
            f"{rate:g}",
            f"{updates:,}",
            str(len(results)),
            f"{loss:.3f}" if math.isfinite(loss) else "failed",
            f"{min(worths):.3f}" if worths else "-",
            f"{fit} of {len(results)}",
            "confirms" if confirms else "chosen" if rate == choice.rate else "",
        )
