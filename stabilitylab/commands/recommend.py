"""``recommend``: cheap probes of all architectures at one depth, ranked by a fixed rule."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import ResourceError, UsageError
from . import command
from ._options import JSON, QUIET, VERBOSE

if TYPE_CHECKING:
    from ..recommend import Measurement, Ranked
    from ..recommend.checking import Check

LIMITS = """\
What this cannot say: where training would end. Nothing was trained beyond {updates} updates from initialisation, so
the table does not know of trouble that comes later (BranchNorm once its alpha nears 1, a loss spike at step 30,000),
of final quality, or of data, width and batches other than these; and headroom is that of {rates} updates at most, not
of a long run. The numbers are measured, their order is a convention: equal weights, fixed beforehand. Where it was
checked, at 12, 36 and 100 layers, it foretold how short training ended no better than chance, though at 100 it had the
one that failed, Post-LN, last (docs/recommend.md). --check FOLDER holds it against runs of yours."""


@command("recommend", rank=50)
def recommend(
    depth: Annotated[int, typer.Option(help="Layers in all: 200 is 100 encoder and 100 decoder layers.")] = 200,
    d_model: Annotated[
        int | None, typer.Option("--d-model", help="Width; blocks and heads go with it.", show_default="by preset")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="by preset")] = None,
    data: Annotated[str | None, typer.Option(help="As for 'probe'.", show_default="synthetic")] = None,
    valid: Annotated[str | None, typer.Option(help="As for 'probe'.")] = None,
    archs: Annotated[str, typer.Option(help="all, or names with commas between them.")] = "all",
    seeds: Annotated[str, typer.Option(help="Such as 0..2 or 3,4; more of them, more certain.")] = "0",
    stack: Annotated[
        Literal["encoder-decoder", "encoder", "decoder"] | None, typer.Option(help="As for 'probe'.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="tiny, small or base.", show_default="tiny")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file, as for 'probe'.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, as for 'probe'.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Folder of trained runs with these settings: how well was it predicted?")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of measurements; finished ones are kept.")] = Path("runs/recommend"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it would take; measure nothing.")] = False,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Rank architectures for a depth by cheap probes: initialisation, 30 updates, a learning-rate range test."""
    from .. import recommend as recommending
    from ..config import merge, parse_set, read_config_file
    from ..recommend.measurement import file_name, is_finished
    from ._stability import seeds_of

    flags = {
        "preset": preset,
        "model": {"stack": stack},
        "data": {"source": data, "valid": valid},
        "train": {"lr": lr},
    }
    given = merge(read_config_file(config) if config else {}, _given(flags), parse_set(set_ or ()))
    chosen = () if archs.strip() == "all" else [name.strip() for name in archs.split(",") if name.strip()]
    if not chosen and archs.strip() != "all":
        raise UsageError("--archs names no architecture: give all, or names with commas between them.")
    ask = recommending.Ask(depth, d_model, chosen, seeds_of(seeds) or (), given)
    configs, notes = recommending.wanted(ask)
    runs = None if check is None else _runs(check)
    missing = [one for one in configs if not is_finished(out / file_name(one), one)]
    if missing:
        need = recommending.estimate(missing, jobs)
        if not quiet:
            kept = f"; {len(configs) - len(missing)} are there already" if len(missing) < len(configs) else ""
            print(f"{need.sentence(jobs)}{kept}", file=sys.stderr)
    if dry_run:
        return
    found = _measured(configs, out, jobs, quiet)
    places = recommending.ranking(found)
    judged = None if runs is None else _judged(found, runs)
    if as_json:
        print(json.dumps(_document(found, places, judged, notes), indent=2))
    else:
        _show(places, notes, judged)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    trimmed = {k: {n: v for n, v in s.items() if v is not None} if isinstance(s, dict) else s for k, s in flags.items()}
    return {key: value for key, value in trimmed.items() if value is not None}


def _runs(folder: Path) -> Any:
    from ..reports.build import load

    runs, _ = load(folder)  # InputError where there are none
    return runs


def _judged(found: list[Measurement], runs: Any) -> Check:
    from ..recommend.checking import check

    return check(found, runs)


def _measured(configs: Any, out: Path, jobs: int, quiet: bool) -> list[Measurement]:
    from .. import recommend as recommending

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console, shown = Console(stderr=True), not quiet
    with Progress(*columns, console=console, disable=quiet or not sys.stderr.isatty()) as progress:
        bar = progress.add_task("measurements", total=len(configs))

        def done(name: str) -> None:
            progress.advance(bar)
            if shown and not sys.stderr.isatty():
                finished = int(progress.tasks[0].completed)
                print(f"{finished}/{len(configs)} {name}", file=sys.stderr)

        found, failed = recommending.measure_all(configs, out, jobs, done)
    if failed:
        name, sentence = next(iter(failed.items()))
        raise ResourceError(
            f"{len(failed)} of {len(configs)} measurements failed, such as {name} ({sentence}); "
            "the others are kept: the same command goes on."
        )
    return found


def _document(found: list[Measurement], places: list[Ranked], judged: Check | None, notes: list[str]) -> Any:
    from dataclasses import asdict

    from ..recommend import COLUMNS
    from ..store.layout import plain

    return plain(
        {
            "columns": {column.name: column.sentence for column in COLUMNS},
            "ranking": [asdict(place) for place in places],
            "measurements": [asdict(one) for one in found],
            "check": None if judged is None else asdict(judged),
            "notes": notes,
        }
    )


def _show(places: list[Ranked], notes: list[str], judged: Check | None) -> None:
    from ..recommend import COLUMNS
    from ..recommend.columns import RATES, UPDATES
    from ..reports.measures.comparison import counted

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)

    def say(text: str = "") -> None:
        console.print(text, highlight=False, markup=False)

    ranked, others = ([column for column in COLUMNS if bool(column.better) is kind] for kind in (True, False))
    base = next((place.numbers["seconds"] for place in places if place.arch == "postln"), math.nan)
    for columns, own in ((ranked, ["mean rank"]), (others, ["x Post-LN"])):
        table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
        for title in ("", "architecture", *own, *(column.title for column in columns)):
            table.add_column(title, justify="left" if title == "architecture" else "right")
        for place in places:
            ratio = place.numbers["seconds"] / base
            cost = "-" if math.isnan(ratio) else f"{ratio:.2f}"
            first = f"{place.score:.1f}" if columns is ranked else cost
            cells = [_cell(place, column.name) for column in columns]
            table.add_row(f"{place.place}{'!' * bool(place.broken)}", place.arch, first, *cells)
        if columns is others:
            say("\nnot ranked:")
        console.print(table, highlight=False, markup=False)
    if broken := [place for place in places if place.broken]:
        say("\n! a bound is broken:")
        for place in broken:
            say(f"  {place.arch}: {'; '.join(place.broken)}")
    say()
    for column in COLUMNS:
        say(f"{column.title}: {column.sentence}")
    seeds = places[0].seeds if places else 0
    say(f"Medians over {counted(seeds)}; mean rank: over seeds and the columns beside it. x Post-LN: of its time.")
    for note in notes:
        say(note)
    say(f"\n{LIMITS.format(updates=UPDATES, rates=RATES)}")
    if judged is not None:
        _show_check(judged, say)


def _cell(place: Ranked, name: str) -> str:
    from ..terminal import number

    value = place.numbers[name]
    if math.isnan(value):
        return "-"
    if name == "parameters":
        return f"{value:,.0f}"
    if name == "headroom":
        return f"{'>' * place.unbroken}{value:.3g}"
    return number(value)


def _show_check(judged: Check, say: Any) -> None:
    states = ", ".join(f"{count} {state}" for state, count in judged.states.items() if count)
    say(f"\nAgainst trained runs of {len(judged.real)} architectures ({states}), Spearman's rho [95 % interval]:")
    for one in judged.agreements:
        text = "no order" if math.isnan(one.rho) else f"{one.rho:+.2f} [{one.low:+.2f}, {one.high:+.2f}]"
        say(f"  {one.name}: {text}")
    if not math.isnan(judged.reliability):
        say(f"  one seed of the trained runs with another: {judged.reliability:+.2f}, about what can be reached at all")
