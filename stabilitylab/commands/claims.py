"""``claims``: the ledger, with a verdict of the runs at hand on each published claim."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import ResourceError
from . import command
from ._options import JSON, QUIET, RUNS, VERBOSE

if TYPE_CHECKING:
    from ..reports.claims import Finding

MARKS = {"reproduced": "green", "contradicted": "red", "inconclusive": "yellow", "not testable": "dim"}


@command("claims", rank=70)
def claims(
    folder: Annotated[Path, typer.Argument(help="Folder of run directories.")] = RUNS,
    fast: Annotated[
        bool, typer.Option("--fast", help="First make the one-step runs of C01-C04, C06-C08, C11, C17, C19-C30.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of --fast.")] = min(4, os.cpu_count() or 1),
    data: Annotated[str | None, typer.Option(help="Data of --fast, as for 'probe'.", show_default="synthetic")] = None,
    only: Annotated[list[str] | None, typer.Option("--claim", help="Only this claim, such as C20; repeatable.")] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> int:
    """Judge the papers' claims on the runs at hand.

    Exit 0 whatever the verdicts, 1 where a claim's test itself fails.
    """
    if fast:
        _make_fast(folder, jobs, data, quiet)
    from ..reports.build import load
    from ..reports.claims import CLAIMS, ledger

    chosen = {CLAIMS.resolve(id) for id in only or CLAIMS}
    runs, broken = load(folder)
    findings = [finding for finding in ledger(runs, broken) if finding.claim.id in chosen]
    for path, sentence in broken:
        print(f"{path.name}: {sentence}", file=sys.stderr)
    if as_json:
        from ..store.layout import plain

        print(json.dumps(plain({"claims": [finding.as_dict() for finding in findings]}), indent=2))
    else:
        _show(findings)
    failed = [finding for finding in findings if finding.error is not None]
    for finding in failed:
        print(f"{finding.claim.id}: {finding.why}", file=sys.stderr)
        if verbose:
            traceback.print_exception(finding.error)
    return int(bool(failed))


def _make_fast(out: Path, jobs: int, data: str | None, quiet: bool) -> None:
    from .. import onestep
    from ..experiments import experiments, folder

    todo = [(one.name, one.config) for one in experiments("claims:fast", data={"source": data} if data else None)]
    columns = (TextColumn("one-step runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=len(todo))
        failed = onestep.measure_all(todo, out / folder("claims:fast"), jobs, lambda _name: progress.advance(bar))
    if failed:
        name, sentence = next(iter(failed.items()))
        raise ResourceError(
            f"{len(failed)} of {len(todo)} one-step runs failed, such as {name} ({sentence}); "
            "the others are kept: the same command goes on."
        )


def _show(findings: list[Finding]) -> None:
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    for column in ("claim", "verdict", "what a paper says", "effect [95 % interval]", "seeds", "threshold"):
        table.add_column(column)
    for finding in findings:
        lines = finding.effects or [{}]
        for place, effect in enumerate(lines):
            head = (finding.claim.id, finding.verdict, f"{finding.claim.sentence} ({finding.claim.source})")
            shown = head if place == 0 else ("", "", "")
            table.add_row(shown[0], shown[1], shown[2], *_cells(finding, effect), style=MARKS[finding.verdict])
    console.print(table, highlight=False, markup=False)
    verdicts = [finding.verdict for finding in findings]
    console.print("\n" + ", ".join(f"{verdicts.count(v)} {v}" for v in MARKS if v in verdicts), highlight=False)
    commands = dict.fromkeys(finding.command for finding in findings if finding.command)
    if commands:
        console.print("what is not testable needs:", highlight=False)
        for one in commands:
            console.print(f"  {one}", highlight=False, markup=False)


def _cells(finding: Finding, effect: dict[str, Any]) -> tuple[str, str, str]:
    if not effect:
        return finding.why, "", finding.claim.threshold
    text = f"{effect['effect']} {effect['mean']:.3g}"
    if not math.isnan(effect["low"]):
        text += f" [{effect['low']:.3g}, {effect['high']:.3g}]"
    needed = f" (would need {effect['needed']})" if effect["verdict"] == "inconclusive" and effect["needed"] else ""
    against = f"; X {effect['contradicted']}" if effect["contradicted"] else ""
    return text, f"{effect['n']}{needed}", f"R {effect['reproduced']}{against}"
