"""``claims``: the ledger, with a judgement from the runs at hand on each published claim."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import ResourceError, UsageError
from ..printable import screen
from ._claims_shown import show, show_power
from ._options import JSON, QUIET, RUNS, VERBOSE, print_json
from .base import command


@command("claims", rank=70)
def claims(
    folder: Annotated[Path, typer.Argument(help="Folder of run directories.")] = RUNS,
    fast: Annotated[
        bool, typer.Option("--fast", help="First make the one-step runs of C01-C04, C06-C08, C11, C17, C19-C30.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of --fast.")] = min(4, os.cpu_count() or 1),
    data: Annotated[str | None, typer.Option(help="Data of --fast, as for 'probe'.", show_default="synthetic")] = None,
    only: Annotated[list[str] | None, typer.Option("--claim", help="Only this claim, such as C20; repeatable.")] = None,
    power: Annotated[
        bool, typer.Option("--power", help="Before runs are made, show which claims their seeds can decide.")
    ] = False,
    pilot: Annotated[
        Path | None, typer.Option(help="With --power: take the spread from this claims.csv, not from runs.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Judge the papers' claims on the runs at hand; with --power, say which claims planned runs could decide.

    Exit 0 whatever the judgements are, 1 if the test of a claim fails with an error.
    """
    if pilot and not power:
        raise UsageError("--pilot gives --power the spread of each claim's number: add --power.")
    if power and fast:
        raise UsageError("--power looks at runs before they are made, and --fast makes them: leave one of the two out.")
    if data is not None and not fast:
        raise UsageError("--data is the data of the runs that --fast makes: add --fast, or leave --data out.")
    if power:
        return _power(folder, pilot, only or (), as_json)
    if fast:
        _make_fast(folder, jobs, data, quiet)
    from ..reports.build import load
    from ..reports.claims import CLAIMS, ledger
    from ..reports.headline import headline

    chosen = {CLAIMS.resolve(id) for id in only or CLAIMS}
    runs, broken = load(folder)
    everything = ledger(runs, broken)
    findings = [finding for finding in everything if finding.claim.id in chosen]
    for path, sentence in broken:
        print(f"{path.name}: {sentence}", file=sys.stderr)
    if as_json:
        print_json({"headline": headline(findings), "claims": [finding.as_dict() for finding in findings]})
    else:
        show(findings, everything)
    failed = [finding for finding in findings if finding.error is not None]
    for finding in failed:
        print(f"{finding.claim.id}: {finding.why}", file=sys.stderr)
        if verbose:
            traceback.print_exception(finding.error)
    return int(bool(failed))


def _make_fast(out: Path, jobs: int, data: str | None, quiet: bool) -> None:
    from .. import onestep
    from ..experiments import experiments, folder

    todo = [(one.name, one.config) for one in experiments("claims:fast", data={"source": data} if data else None)]
    columns = (TextColumn("one-step runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen(stderr=True), disable=quiet or not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=len(todo))
        failed = onestep.measure_all(todo, out / folder("claims:fast"), jobs, lambda _name: progress.advance(bar))
    if failed:
        name, sentence = next(iter(failed.items()))
        raise ResourceError(
            f"{len(failed)} of {len(todo)} one-step runs failed, such as {name} ({sentence}); "
            "the others are kept: run the same command again to make the rest."
        )


def _power(folder: Path, pilot: Path | None, only: Sequence[str], as_json: bool) -> int:
    from ..reports import power as planning
    from ..reports.build import load
    from ..reports.claims import CLAIMS

    chosen = {CLAIMS.resolve(id) for id in only or CLAIMS}
    pilots = planning.from_ledger(pilot) if pilot else planning.from_runs(load(folder)[0])
    found = [planning.power(CLAIMS[id], pilots.get(id)) for id in sorted(chosen)]
    if as_json:
        print_json({"power": [one.as_dict() for one in found]})
    else:
        show_power(found)
    return 0
