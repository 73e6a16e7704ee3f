"""Options that several commands share, the flags that were given, and the answer to ``--json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

RUNS = Path("runs")
JSON = typer.Option("--json", help="Print one JSON object on stdout.")
QUIET = typer.Option("-q", "--quiet", help="Show no progress.")
VERBOSE = typer.Option("-v", "--verbose", help="Log more; show tracebacks.")


def given_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags, by section. A flag that was not given (None) is left out, so that presets and files still
    decide the setting."""
    trimmed = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in flags.items()
    }
    return {key: value for key, value in trimmed.items() if value not in (None, {})}


def print_json(facts: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print one JSON object; numbers that are not finite become text."""
    from ..store.documents import plain

    print(json.dumps(plain(facts), indent=indent))
