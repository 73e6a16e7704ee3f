"""``recommend``: forecasts of architectures, the safest first, with the cost of an update."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..printable import screen
from . import command
from ._forecasts import CONFIG, D_MODEL, DATA, DEPTH, LR, MODEL, PRESET, SET, STACK, VALID, WARMUP, Design, Stack
from ._options import JSON, QUIET, VERBOSE

if TYPE_CHECKING:
    from ..forecast import Forecast

BECAME = (
    "'recommend' sorts forecasts, which 'forecast' gives with their evidence; its ranking by measurements at "
    "initialisation is gone."
)


@command("recommend", rank=50)
def recommend(
    depth: Annotated[int, DEPTH] = 36,
    d_model: Annotated[int | None, D_MODEL] = None,
    lr: Annotated[float | None, LR] = None,
    warmup: Annotated[int | None, WARMUP] = None,
    data: Annotated[str | None, DATA] = None,
    valid: Annotated[str | None, VALID] = None,
    archs: Annotated[str, typer.Option("--arch", "--archs", help="all, or names with commas between them.")] = "all",
    stack: Annotated[Stack | None, STACK] = None,
    model: Annotated[Design | None, MODEL] = None,
    preset: Annotated[str | None, PRESET] = None,
    config: Annotated[Path | None, CONFIG] = None,
    set_: Annotated[list[str] | None, SET] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Sort architectures by what 'forecast' says of them, and by the cost of an update.

    Its ranking by measurements at initialisation is gone: held against trained runs it had foretold no order.
    """
    from .. import forecast as room
    from ..store.layout import plain
    from ._forecasts import about, chosen, flags, of_archs, settings

    given = settings(flags(preset, stack, model, data, valid, lr, warmup), config, set_ or ())
    if not quiet:
        print(BECAME, file=sys.stderr)
    found = []
    for one in of_archs(depth, d_model, chosen(archs), given, quiet):
        found.append(one)
        if not quiet:
            print(f"measured {one.name} ({len(found)})", file=sys.stderr)
    found.sort(key=standing)
    if as_json:
        print(json.dumps(plain({"forecasts": [one.as_dict() for one in found]}), indent=2))
        return
    _show(found)
    if all(math.isnan(one.risk) for one in found):
        print("Nothing could be told: the order is that of seconds an update alone, which vary from call to call.")
    if not quiet and (words := about(room.fitted(), found)):
        print(f"\n{words}")


def standing(one: Forecast) -> tuple[float, float, str]:
    """Return the sort key: P(fails) to a tenth (its accuracy), then cost; an architecture without a forecast comes
    last."""
    return math.inf if math.isnan(one.risk) else round(one.risk, 1), one.measured.update_seconds, one.name


def _show(found: list[Forecast]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for title in ("architecture", "forecast", "P(fails)", "critical rate", "s an update"):
        table.add_column(title, justify="left" if title in ("architecture", "forecast") else "right")
    for one in found:
        fails = "-" if one.fails is None else f"{one.fails.value:.2f} [{one.fails.low:.2f}, {one.fails.high:.2f}]"
        rate, seen = one.rate, one.seen
        edge = "-" if rate is None else f"{rate.value:.2g} [{rate.low:.2g}, {rate.high:.2g}]"
        if seen is not None:
            fails, edge = "known", f"{seen.low:.2g} to {seen.high:.2g}"
        table.add_row(one.name, one.word, fails, edge, f"{one.measured.update_seconds:.2g}")
    screen(width=None if sys.stdout.isatty() else 140).print(table, highlight=False, markup=False)
    for reason in dict.fromkeys(reason for one in found for reason in one.why_not if one.seen is None):
        print(f"cannot tell: {reason}")
