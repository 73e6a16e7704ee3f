"""``compare``: the first step, layer and probe where two runs part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from .options import JSON, VERBOSE

if TYPE_CHECKING:
    from ..diagnose import Comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two run directories.", show_default=False)],
    rtol: Annotated[float, typer.Option(min=0, help="Relative difference that still counts as equal.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Absolute difference that still counts as equal.")] = 0.0,
    as_json: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Find the first step, layer and probe where two runs part, in order of execution. Works while they are going.

    Without a tolerance equal means bit for bit; exit 0 whatever it says.
    """
    if len(runs) != 2:
        raise UsageError(f"compare takes two run directories, not {len(runs)}.")
    from ..diagnose import compare as compared
    from ..store import Run
    from ..store.layout import plain

    found = compared(Run.open(runs[0]), Run.open(runs[1]), rtol=rtol, atol=atol)
    if as_json:
        print(json.dumps(plain(found.as_dict()), indent=2))
    else:
        _show(found)


def _show(found: Comparison) -> None:
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)

    def say(text: str = "") -> None:
        console.print(text, highlight=False, markup=False)

    say(found.paragraph)
    if found.first is not None:
        table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
        for column in ("differs by more than", "first at step", "phase", "probe", "where"):
            table.add_column(column, justify="right" if "step" in column or "than" in column else "left")
        for level, one in found.growth.items():
            cells = ("-", "", "", "") if one is None else (str(one.step), one.phase, one.probe, one.where)
            table.add_row(f"{100 * level:g} %", *cells)
        say()
        console.print(table, highlight=False, markup=False)
    if found.settings:
        say("\nsettings that differ:")
        for key, (a, b) in found.settings.items():
            say(f"  {key}: {a} | {b}")
    for name, path in (("a", found.a), ("b", found.b)):
        own = found.only[name]
        parts = [f"{kind} {', '.join(own[kind])}" for kind in ("tables", "metrics") if own[kind]]
        parts += [f"{own['steps']} steps from {own['first_step']} on"] if own["steps"] else []
        if parts:
            say(f"only in {path}: {'; '.join(parts)}")
