"""``verify``: a check that run directories hold what was written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._options import JSON, QUIET, VERBOSE
from .base import command

if TYPE_CHECKING:
    from ..store.verify import Verified


@command("verify", rank=140)
def verify(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of them.", show_default=False)],
    reseal: Annotated[
        bool, typer.Option("--reseal", help="First give a new checksum to JSON files that you changed on purpose.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Check that runs are complete and undamaged: checksums, schema, parts, missing steps.

    Exit 1 if one of the runs is damaged or incomplete.
    """
    from ..store.folders import run_directories
    from ..store.verify import reseal_all
    from ..store.verify import verify as verified

    paths = [path for given in runs for path in run_directories(given)]
    if reseal:
        for changed in (file for path in paths for file in reseal_all(path)):
            print(f"{changed}: has a new checksum", file=sys.stderr)
    found = [verified(path) for path in paths]
    if as_json:
        print(json.dumps({"runs": [_facts(one) for one in found]}, indent=2))
    else:
        for one in found:
            if one.findings or not quiet:
                print(_sentence(one))
            for finding in one.findings:
                print(f"  {finding}")
    return int(any(one.findings for one in found))


def _facts(one: Verified) -> dict[str, object]:
    told = {"rows": one.rows, "files": one.files, "unchecked": one.unchecked, "being_written": one.live}
    return {"run": str(one.path), "ok": not one.findings, **told, "findings": one.findings}


def _sentence(one: Verified) -> str:
    words = [f"{one.rows:,} rows, {one.files:,} files"]
    words += [f"{one.unchecked:,} of them unchecked, since an older version wrote them"] * bool(one.unchecked)
    words += ["being written"] * one.live
    verdict = f"{len(one.findings)} thing{'s' * (len(one.findings) > 1)} wrong" if one.findings else "ok"
    return f"{one.path}: {verdict} ({', '.join(words)})"
