"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import typer

RUNS = Path("runs")
JSON = typer.Option("--json", help="Print one JSON object on stdout.")
QUIET = typer.Option("-q", "--quiet", help="No progress.")
VERBOSE = typer.Option("-v", "--verbose", help="Log more; show tracebacks.")
