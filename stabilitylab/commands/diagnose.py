"""``diagnose``: what happened in a run, in which order, and what the evidence is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import command
from ._options import JSON, VERBOSE

if TYPE_CHECKING:
    from ..diagnose import Diagnosis


@command("diagnose", rank=90)
def diagnose(
    run: Annotated[Path, typer.Argument(help="Run directory, of 'probe' or of watch().", show_default=False)],
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 at a warning or a failure.")] = False,
    as_json: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Say what happened in a run and in which order: jumps, spikes, vanishing gradients, NaN, plateaus.

    Exit 0 whatever it says; with --fail, exit 1 at a warning or a failure. Works while the run is going.
    """
    from ..diagnose import diagnose as diagnosed
    from ..store import Run
    from ..store.layout import plain

    found = diagnosed(Run.open(run))
    if as_json:
        print(json.dumps(plain(found.as_dict()), indent=2))
    else:
        _show(found)
    return int(fail and found.verdict in ("warning", "failure"))


def _show(found: Diagnosis) -> None:
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(found.paragraph, highlight=False, markup=False)
    if found.events:
        table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
        for column in ("step", "until", "event", "where", "strength", "evidence"):
            table.add_column(column, justify="right" if column in ("step", "until", "strength") else "left")
        for event in found.events:
            until = "" if event.until is None else str(event.until)
            strength = "note" if event.severity == "note" else f"{event.strength:.3g}"
            table.add_row(str(event.step), until, event.title, event.where, strength, event.evidence)
        console.print()
        console.print(table, highlight=False, markup=False)
    from ..diagnose.events import DETECTORS

    console.print(f"\nchecked: {', '.join(DETECTORS[kind].title for kind in found.checked)}", highlight=False)
    for kind, why in found.unchecked.items():
        console.print(f"not checked: {DETECTORS[kind].title}; {why}", highlight=False, markup=False)
