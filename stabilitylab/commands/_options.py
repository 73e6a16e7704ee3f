"""What several commands share: the exit codes in their help, and common options."""

from __future__ import annotations

from pathlib import Path

import typer

EXIT_CODES = """\
Exit codes: 0 ok; 1 a check failed or internal error; 2 usage or configuration; 3 diverged under --fail-on-divergence;
4 input, data or run missing or unreadable; 5 environment (no CUDA, no space, a missing extra); 130 / 143 stopped by
Ctrl-C / SIGTERM, after a flush and a checkpoint."""
RUNS = Path("runs")
JSON = typer.Option("--json", help="Print one JSON object on stdout.")
QUIET = typer.Option("-q", "--quiet", help="No progress.")
VERBOSE = typer.Option("-v", "--verbose", help="Log more; show tracebacks.")
