"""``report``: figures, ledger and page from run directories."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from ._options import JSON, QUIET, RUNS, VERBOSE

if TYPE_CHECKING:
    from ..reports.build import Built


@command("report", rank=60)
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of run directories, or one of them.")] = RUNS,
    out: Annotated[Path, typer.Option(help="Where index.html, figures/ and claims.csv go.")] = Path("report"),
    figure: Annotated[
        list[str] | None, typer.Option(help="Only this figure, such as branchnorm:8 (a bare 8 means that); repeatable.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="Diagnose this run (its name in the table of runs); repeatable.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Make the papers' figures, the ledger of claims and one page of them, as far as the runs allow.

    Exit 1 where an error kept a figure, a run's part of the page or a claim's verdict from being made; all others are.
    """
    from ..reports.build import build
    from ..stopping import stopping

    console = Console(stderr=True)
    with stopping(), console.status("report") as status:
        shown = console.is_terminal and not quiet
        built = build(
            folder,
            out,
            figures=figure or (),
            diagnosed=run or (),
            progress=lambda what: status.update(f"report: {what}") if shown else None,
        )
    if as_json:
        print(json.dumps(_facts(built), indent=2))
    elif quiet:
        print(built.page)
    else:
        _show(built)
    for one in built.failed:
        if quiet or as_json:
            print(f"{one.id}: {one.sentence}", file=sys.stderr)
        if verbose:
            traceback.print_exception(one.error)
    return int(bool(built.failed))


def _facts(built: Built) -> dict[str, object]:
    from ..reports.headline import headline

    return {
        "page": str(built.page),
        "figures": [
            {"id": section.id, "finding": section.picture.finding, "files": section.files} for section in built.sections
        ],
        "missing": [{"id": one.id, "why": one.sentence, "command": one.command} for one in built.missing],
        "failed": [{"id": one.id, "why": one.sentence} for one in built.failed],
        "claims": headline(built.findings),
        "unreadable": [{"run": str(path), "why": sentence} for path, sentence in built.broken],
    }


def _show(built: Built) -> None:
    from ..reports.headline import tallies

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, padding=(0, 2), show_header=False, pad_edge=False)
    for section in built.sections:
        table.add_row(section.id, section.picture.finding)
    console.print(table, highlight=False, markup=False)
    if built.missing:
        console.print("\nnot made, for want of runs:", highlight=False)
        for one in built.missing:
            console.print(f"{one.id}: {one.sentence}; {one.command}", highlight=False, markup=False)
    if built.failed:
        console.print("\nnot made, because of an error (-v shows where):", highlight=False)
        for one in built.failed:
            console.print(f"{one.id}: {one.sentence}", highlight=False, markup=False)
    console.print(f"\n{len(built.findings)} claims:", highlight=False)
    for tally in tallies(built.findings):
        console.print(f"  {tally}", highlight=False, markup=False)
    for path, sentence in built.broken:
        print(f"{path.name}: {sentence}", file=sys.stderr)
    console.print(f"page: {built.page}", highlight=False, markup=False)
