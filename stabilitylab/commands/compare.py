"""``compare``: runs side by side, and for two runs the first step, layer and probe at which they differ."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import DamagedError, UsageError, listed
from ..printable import screen
from ._options import JSON, VERBOSE, print_json
from .base import command

if TYPE_CHECKING:
    from ..diagnose import Comparison, Standing, Standings
    from ..store import Run


@command("compare", rank=100)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two runs or more, or their folder.", show_default=False)],
    rtol: Annotated[float, typer.Option(min=0, help="Two runs: relative difference that still counts as equal.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Two runs: absolute difference that still counts as equal.")] = 0.0,
    as_json: Annotated[bool, JSON] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Put runs side by side; for two, find the first step, layer and probe that differ.

    Works while the runs are going. Without a tolerance, equal means bit for bit. Exit 0 whatever it finds.
    """
    from ..store import Run
    from ..store.folders import run_directories

    left, unreadable = [run for path in runs for run in run_directories(path)], []
    if len(left) < 2:
        Run.open(left[0])  # raises InputError if there is no run
        raise UsageError("there is one run: give two run directories or more, or a folder of them.")
    if len(left) > 2 and (rtol or atol):
        raise UsageError("--rtol and --atol are for two runs: give two runs, or leave the tolerances out.")
    from ..diagnose import compare as compared
    from ..diagnose import side_by_side

    opened: list[Run] = []
    while True:
        try:
            with screen(stderr=True).status(f"comparing {len(left)} runs"):
                opened = [Run.open(path) for path in left]
                found = compared(opened[0], opened[1], rtol=rtol, atol=atol) if len(opened) == 2 else None
                standings = side_by_side(opened)
            break
        except DamagedError as error:
            if len(left) <= 2:
                raise
            left.remove(error.run)
            unreadable.append({"run": str(error.run), "why": str(error)})
    for one in unreadable:
        print(f"left out: {one['why']}", file=sys.stderr)
    if as_json:
        facts = {} if found is None else found.as_dict()
        more = {"side_by_side": standings.as_dict(), "unreadable": unreadable}
        print_json(facts | more)
        return
    console = screen(piped=10_000)
    _side_by_side(console, standings, opened if found is None else [])
    if found is not None:
        console.print()
        _show(console, found, opened)


def _side_by_side(console: Console, standings: Standings, runs: Sequence[Run]) -> None:
    """Print one row a run, or one column if that fits better, and below it the settings in which ``runs`` differ."""
    from ..terminal import Field, fitted, print_table

    paths = [row.run for row in standings.rows]
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]) if len({*paths}) > 1 else ""
    loss = _number("loss", ".4f", lost="nan" if standings.loss else "")
    shown = [
        (Field("run"), lambda row: os.path.relpath(row.run, folder or ".")),
        (Field("arch", need=8), lambda row: row.label),
        (Field("layers", need=3), lambda row: row.layers),
        (Field("seed", need=2, right=True), lambda row: "" if row.seed is None else str(row.seed)),
        (Field("state", need=9, state=True), lambda row: row.state),
        (Field(f"{standings.loss or 'loss'} at {standings.step}", need=10, right=True), loss),
        (Field("- unigram, last", need=6, right=True), _number("gap", "+.3f")),
        (Field("gradient decades", need=5, right=True), _number("gradient_decades", ".2f")),
        (Field("norm inputs grew", need=4, right=True), _number("norm_growth", ".2f", "x")),
        (Field("||dF||", need=4, right=True), _number("moved", ".3g")),
        (Field("tokens/s", need=1, right=True), _number("tokens_per_second", ",.0f")),
        (Field("first trouble", need=7, prose=True), lambda row: row.trouble or "none"),
    ]
    columns, cells = [column for column, _ in shown], [[show(row) for _, show in shown] for row in standings.rows]
    print_table(console, *fitted(console, columns, cells))
    if runs and standings.settings:
        _settings(console, runs, standings.settings)
    console.print(f"\n{standings.paragraph}")


def _settings(console: Console, runs: Sequence[Run], differing: Mapping[str, tuple[Any, ...]]) -> None:
    """Print a line a setting. A section that only some of ``runs`` have gets one line for all settings in which these
    agree."""
    lines: dict[str, str] = {}
    alone: dict[str, list[str]] = {}
    for key, values in differing.items():
        section, nested, _ = key.partition(".")
        having = [isinstance(run.config.get(section), Mapping) for run in runs]
        own = {repr(value) for value, has in zip(values, having, strict=True) if has}
        if nested and not all(having) and len(own) == 1:
            alone.setdefault(section, []).append(key)
        lines[key] = f"{key}: {' | '.join('(not set)' if value is None else str(value) for value in values)}"
    for section, keys in alone.items():
        if len(keys) > 1:
            owners = [str(run.path) for run in runs if isinstance(run.config.get(section), Mapping)]
            for key in keys:
                del lines[key]
            have = "have" if len(owners) > 1 else "has"
            lines[section] = f"{section}: {len(keys)} settings that only {listed(owners)} {have} (--json lists them)"
    console.print("\nsettings that differ:")
    for line in lines.values():
        console.print(f"  {line}")


def _number(field: str, digits: str, unit: str = "", lost: str = ""):
    """Return a function that shows a field of a standing as text. NaN becomes ``lost``, which is empty if NaN means
    "not measured"."""

    def show(row: Standing) -> str:
        value = getattr(row, field)
        return lost if math.isnan(value) else f"{value:{digits}}{unit}"

    return show


def _show(console: Console, found: Comparison, runs: Sequence[Run]) -> None:
    console.print(found.paragraph)
    if found.first is not None:
        from ..terminal import Field, print_table

        names = ("differs by more than", "first at step", "phase", "probe", "where")
        needs = {"phase": 1, "probe": 2, "where": 3}
        columns = [Field(name, right=name not in needs, need=needs.get(name, 0)) for name in names]
        growth = []
        for level, one in found.growth.items():
            first = ("-", "", "", "") if one is None else (str(one.step), one.phase, one.probe, one.where)
            growth.append([f"{100 * level:g} %", *first])
        console.print()
        print_table(console, columns, growth)
    if found.settings:
        _settings(console, runs, found.settings)
    for name, path in (("a", found.a), ("b", found.b)):
        own = found.only[name]
        parts = [f"{kind} {', '.join(own[kind])}" for kind in ("tables", "metrics") if own[kind]]
        parts += [f"{own['steps']} steps from {own['first_step']} on"] if own["steps"] else []
        if parts:
            console.print(f"only in {path}: {'; '.join(parts)}")
