"""``export``: a run's tables for other programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ._options import JSON, QUIET, VERBOSE
from .base import command


@command("export", rank=110)
def export(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    to: Annotated[
        Literal["csv", "parquet", "tensorboard", "latex"],
        typer.Option("--to", help="Format; latex: first, middle and last layer, first and last step."),
    ],
    out: Annotated[Path | None, typer.Option(help="New folder for the files.", show_default="RUN-FORMAT")] = None,
    tables: Annotated[
        str | None, typer.Option(help="Names of tables, comma-separated; metrics is one.", show_default="all")
    ] = None,
    by: Annotated[
        Literal["layer", "sublayer"] | None,
        typer.Option(help="Combine rows by the table's own rule.", show_default="no: every recorded place"),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Write a run's tables as CSV, Parquet, TensorBoard scalars or a LaTeX table. Works while the run is going."""
    from ..export import export as exported
    from ..store import Run

    names = None if tables is None else [name.strip() for name in tables.split(",") if name.strip()]
    done = exported(Run.open(run), to, out, names, by)
    if as_json:
        facts = {"out": str(done.out), "files": [str(path) for path in done.files], "not_combined": done.as_they_are}
        print(json.dumps(facts, indent=2))
        return
    if done.as_they_are and not quiet:
        print(f"rows cannot be combined and stay as they are: {', '.join(done.as_they_are)}", file=sys.stderr)
    print(done.out if quiet else f"{len(done.files)} file{'s' * (len(done.files) != 1)} in {done.out}")
