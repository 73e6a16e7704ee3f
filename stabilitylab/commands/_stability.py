"""``sweep table``: the runs of the stability table, and the table itself on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..config import merge, parse_set
from ..errors import UsageError
from ..experiments import SEEDS, asked, experiments, folder, on_device
from ..experiments import minutes as minutes_of
from ..printable import screen

if TYPE_CHECKING:
    from ..sweep import Job, Ledger

TABLE = "table:stability"


def planned(
    scale: str,
    data: dict[str, str],
    set_: Sequence[str],
    archs: str | None,
    depths: str | None,
    seeds: str | None,
    steps: int | None,
    device: str | None,
    out: Path,
    ledger: Ledger | None = None,
) -> list[Job]:
    """Return the jobs of the requested table. Runs that no scheme defines are left out, with one sentence on stderr."""
    from .. import sweep as sweeping

    if steps is not None:
        raise UsageError(f"--steps goes with figures: for the table give --set train.steps={steps}.")
    settings = merge(parse_set(set_), {"data": data})
    ask = asked(TABLE, scale, settings, seeds_of(seeds, counted=True))
    names = [name.strip() for name in (archs or "all").split(",") if name.strip()]
    runs, left_out = sweeping.table(ask, names, _depths(depths))
    if left_out:
        print(left_out, file=sys.stderr)
    return sweeping.plan(on_device(runs, device), out / folder(TABLE, scale), ledger)


def seeds_of(text: str | None, *, counted: bool = False) -> list[int] | None:
    """Return ``3..5`` and ``3,4`` as seeds; a bare ``3`` is seed 3, or, ``counted``, the three seeds from 3 on."""
    if text is None:
        return None
    first, dots, last = text.partition("..")
    try:
        if counted and not dots and "," not in text:
            found = list(range(SEEDS[0], SEEDS[0] + int(text)))
        else:
            found = list(range(int(first), int(last) + 1)) if dots else [int(seed) for seed in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise UsageError(f"--seeds {text!r} are no seeds: give them as 3..7 or 3,4,5.")
    return found


def _depths(text: str | None) -> list[int]:
    try:
        return [int(depth) for depth in text.split(",")] if text is not None else []
    except ValueError:
        raise UsageError(f"--depths {text!r}: give numbers of layers, such as 12,36,100.") from None


def minutes(jobs: Sequence[Job]) -> int:
    """Return the core-minutes of these runs at the width of tiny: the cost of the default table, scaled by layers times
    updates."""

    def work(runs: Sequence) -> int:
        return sum(run.config.model.depth * run.config.train.steps for run in runs)

    whole = minutes_of(TABLE)
    return math.ceil((whole or 0) * work([job.experiment for job in jobs]) / work(experiments(TABLE)))


def show(jobs: Sequence[Job]) -> None:
    """Print the table of the jobs that have ended here, on stdout."""
    from ..reports.collection import Record, Runs
    from ..reports.stability import stability_table, wide
    from ..store import Run

    now = [job.now() for job in jobs]
    if elsewhere := [job for job in now if job.cell is not None]:
        runs = f"{len(elsewhere)} run{'' if len(elsewhere) == 1 else 's'}"
        print(f"not in the table below: {runs} of which only the ledger has the result", file=sys.stderr)
    ended = [job for job in now if job.state == "finished" and job.cell is None]
    data = wide(stability_table(Runs(Record(Run.open(job.path).snapshot(), job.name) for job in ended)))
    if data.empty:
        print("no run of the table has ended", file=sys.stderr)
        return
    table = Table(box=None, padding=(0, 2), header_style="bold", pad_edge=False)
    for column in data.columns:
        table.add_column(column)
    for row in data.to_numpy().tolist():
        table.add_row(*row)
    print("held-out nll - unigram [nats/token], mean over seeds, by encoder and decoder layers together:")
    screen(piped=160).print(table)
