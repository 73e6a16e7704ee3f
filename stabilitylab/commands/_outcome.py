"""The output of ``probe`` about a run that has ended: one JSON object, or a table and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..printable import screen
from ._options import print_json

if TYPE_CHECKING:
    from ..store import Run
    from ..train import Result
    from ..verdict import Verdict


def print_outcome(run: Run, state: str, step: int, verdict: Mapping[str, Any] | None) -> None:
    """Print the result of a run as ``--json`` shows it."""
    from ..terminal import summary

    head, body = summary(run)
    rows = [dict(zip(head, line, strict=True)) for line in body]
    print_json({"run": str(run.path), "state": state, "step": step, "verdict": verdict, "summary": rows})


def print_summary(run: Any, result: Result) -> None:
    console = screen(soft_wrap=True, piped=120)
    from ..terminal import signed, summary

    head, body = summary(run)
    if body:
        table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold")
        for i, column in enumerate(head):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        shown = ""
        for name, *cells in body:
            table.add_row("" if name == shown else name, *cells)
            shown = name
        console.print(table)
        console.print()
    verdict = result.verdict
    if verdict is None:
        text = f"interrupted after {result.row} updates; continue with: stabilitylab probe --resume {result.path}"
    else:
        loss, accuracy = signed(verdict.nll_gap), signed(verdict.accuracy_gap)
        text = (
            f"{verdict.state} since step {verdict.step}: {verdict.reason} "
            f"({_on(verdict, run)}: nll - unigram {loss}, accuracy - unigram {accuracy})"
        )
    console.print(text)
    if speed := _speed(run):
        console.print(speed)
    console.print(f"run: {result.path}")


def _speed(run: Run) -> str:
    """Return the number of real target tokens per second and the share of padding in words; "" if nothing was
    trained."""
    if "tokens_per_second" not in run.metrics or not len(rates := run.metrics["tokens_per_second"].dropna()):
        return ""
    share = run.manifest.get("padding", run.manifest.get("data", {}).get("padding", 0.0))
    return f"{rates.median():,.0f} target tokens/s (median of updates); {share:.0%} of each batch is padding"


def _on(verdict: Verdict, run: Run) -> str:
    """Name the text on which the gap was measured."""
    if not verdict.sentences:
        return "the held-out batch"
    rows = str(run.manifest.get("data", {}).get("rows", ""))  # of running text: "blocks of 24 tokens"
    return f"{verdict.sentences} validation {rows if rows.startswith('blocks') else 'sentences'}"
