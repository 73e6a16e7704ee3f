"""``report``: figures, ledger and page from run directories."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from ..errors import UsageError
from ..printable import screen
from ._options import JSON, QUIET, RUNS, VERBOSE
from .base import command

if TYPE_CHECKING:
    from ..reports.build import Built


@command("report", rank=60)
def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of run directories, or run directories themselves; two of these are compared.",
            show_default="runs",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for index.html, figures/ and claims.csv.")] = Path("report"),
    figure: Annotated[
        list[str] | None, typer.Option(help="Only this figure, such as branchnorm:8 (or 8 alone); repeatable.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="Diagnose this run (its name in the table of runs); repeatable.")
    ] = None,
    place: Annotated[
        str,
        typer.Option(
            help="Draw the histograms of the places that this regular expression matches, such as lm_head; without it, "
            "those of the places that moved most.",
            show_default=False,
        ),
    ] = "",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Write the page again and again while runs go on, and the report at their end."),
    ] = False,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two pages of --watch.")] = 5.0,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Write one page about your runs: curves, findings, layers, and the papers' figures and claims that they allow.

    Exit 1 if an error prevented a figure, a run's part of the page or a claim's judgement; the page has everything
    else. Exit 4 if no run can be read; there is no page then.
    """
    if watch and figure:
        raise UsageError("--watch shows runs, not the papers' figures: leave out --figure.")
    from ..reports.build import build
    from ..reports.page.live import watch as watched
    from ..stopping import stopping

    console = screen(stderr=True)
    chosen = folders or [RUNS]
    columns = (TextColumn("report"), BarColumn(28), TextColumn("{task.fields[what]}", markup=False))
    hidden = quiet or not console.is_terminal
    with stopping() as obey, Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("report", total=None, what="")

        def progress(what: str, done: int, of: int) -> None:
            obey()
            bar.update(task, completed=done, total=of, what=what)

        if watch:

            def told(sentence: str) -> None:
                bar.update(task, what=sentence)
                if hidden and not quiet and sentence not in said:
                    print(sentence, file=sys.stderr)
                said.add(sentence)

            said: set[str] = set()
            built = watched(chosen, out, every, diagnosed=run or (), places=place, told=told, progress=progress)
        else:
            built = build(chosen, out, figures=figure or (), diagnosed=run or (), places=place, progress=progress)
    if as_json:
        print(json.dumps(_facts(built), indent=2))
    elif quiet:
        print(built.page)
    else:
        _show(built, whole=not figure)
    for one in built.failed:
        if quiet or as_json:
            print(f"{one.id}: {one.sentence}", file=sys.stderr)
        if verbose:
            traceback.print_exception(one.error)
    if quiet:
        _say_unreadable(built)
    without_part = built.broken if not figure else ()
    return int(bool(built.failed or without_part))


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


FEW = 5  # for runs that test no claim: up to so many figures that could not be drawn get a line each


def _show(built: Built, whole: bool) -> None:
    """Print findings, what could not be drawn, and the judgements. ``whole``: the report has all figures and claims."""
    from ..reports.headline import tallies

    console = screen(soft_wrap=True, piped=160)
    table = Table(box=None, padding=(0, 2), show_header=False, pad_edge=False)
    for section in built.sections:
        table.add_row(section.id, section.picture.finding)
    console.print(table)
    judged = any(one.verdict != "not testable" for one in built.findings)
    of_ones_own = whole and not judged
    if of_ones_own and len(built.missing) > FEW:
        told = f"\n{len(built.missing)} figures need other runs, and these runs test no claim of the papers."
        console.print(f"{told} The page says what each figure needs, with the command.")
    elif built.missing:
        console.print("\nSkipped, since these figures need other runs:")
        for one in built.missing:
            console.print(f"{one.id}: {one.sentence}; {one.command}")
    if built.failed:
        console.print("\nFailed with an error (-v shows where):")
        for one in built.failed:
            console.print(f"{one.id}: {one.sentence}")
    if judged:
        console.print(f"\n{len(built.findings)} claims:")
        for tally in tallies(built.findings):
            console.print(f"  {tally}")
    elif not whole:
        told = "These runs test no claim about" if built.findings else "No claim is about"
        console.print(f"\n{told} these figures.")
    elif len(built.missing) <= FEW:
        console.print("\nThese runs test no claim of the papers.")
    _say_unreadable(built)
    console.print(f"page: {built.page}")


def _say_unreadable(built: Built) -> None:
    for path, sentence in built.broken:
        print(f"{path.name}: {sentence}", file=sys.stderr)
