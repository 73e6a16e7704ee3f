"""``onestep``: measurements at the initialisation and after one update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from ..printable import screen
from ._options import QUIET, RUNS, VERBOSE, given_flags
from .base import command


@command("onestep", rank=40)
def onestep(
    arch: Annotated[
        str | None, typer.Option(help="Architecture, see 'stabilitylab list'.", show_default="branchnorm")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Layers in all: 36 is 18 encoder and 18 decoder layers.", show_default="200")
    ] = None,
    stack: Annotated[
        Literal["encoder-decoder", "encoder", "decoder"] | None, typer.Option(metavar="STACK", help="As for 'probe'.")
    ] = None,
    model: Annotated[Literal["transformer", "gpt2", "llama"] | None, typer.Option(help="As for 'probe'.")] = None,
    preset: Annotated[str | None, typer.Option(help="tiny, small or base.", show_default="tiny")] = None,
    data: Annotated[str | None, typer.Option(help="As for 'probe'.", show_default="synthetic")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the initial weights.", show_default="0")] = None,
    out: Annotated[Path, typer.Option(help="Folder of run directories.")] = RUNS,
    name: Annotated[str | None, typer.Option(help="Name of the run directory.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file, as for 'probe'.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, as for 'probe'.")
    ] = None,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Measure initialisation and one tiny update in float64: rates by parameter group, perturbations, LN Jacobian."""
    from .. import onestep as measuring
    from ..config import parse_set, read_config_file, resolve
    from ..train.run import free_name

    sections = {"model": {"arch": arch, "stack": stack, "design": model}, "data": {"source": data}}
    flags = given_flags({"preset": preset, **sections, "train": {"seed": seed}})
    settings = resolve(read_config_file(config) if config else {}, flags, parse_set(set_ or ()), depth=depth)
    path = measuring.measure(settings, out, name or free_name(settings, out, "onestep-"))
    if not quiet:
        _show(path)
    print(path if quiet else f"run: {path}")


def _show(path: Path) -> None:
    from ..store import Run
    from ..terminal import number

    run = Run.open(path)
    rates = run.frame("update_rate")
    values = {str(site): value for site, value in zip(rates["site"], rates["value"], strict=True)}
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column("||dF|| / lr")
    groups = list(dict.fromkeys(site.split(".")[1] for site in values))
    for group in groups:
        table.add_column(group, justify="right")
    for optimizer in dict.fromkeys(site.split(".")[0] for site in values):
        table.add_row(optimizer, *(number(values.get(f"{optimizer}.{group}")) for group in groups))
    screen(piped=140).print(table)
