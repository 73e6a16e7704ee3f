"""``evaluate``: translate with a trained run and score it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress

from ..errors import InputError, UsageError
from ..printable import screen
from ._options import JSON, QUIET, VERBOSE
from .base import command

if TYPE_CHECKING:
    from ..store import Run

SHOWN = (
    "bleu",
    "chrf",
    "signature",
    "beam",
    "length_penalty",
    "penalty_kind",
    "row",
    "alpha",
    "sentences",
    "truncated",
)


@command("evaluate", rank=80)
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="One run directory, or several with --paired.")],
    data: Annotated[str | None, typer.Option(help="text:SRC,TGT instead of the run's held-out text.")] = None,
    beam: Annotated[
        int | None, typer.Option(min=1, help="Width of the beam: hypotheses that are kept.", show_default="4")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Exponent of the length penalty.", show_default="0.6")
    ] = None,
    penalty_kind: Annotated[
        Literal["fairseq", "gnmt"] | None,
        typer.Option(help="score / len^p, or score / ((5 + len) / 6)^p.", show_default="fairseq"),
    ] = None,
    sentences: Annotated[
        int | None, typer.Option(min=1, help="Translate only the first N sentences.", show_default="all")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cut a sentence with more source tokens (end of sentence included).",
            show_default="the run's data.max_length",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    paired: Annotated[
        bool,
        typer.Option(
            "--paired",
            help="Compare each run with the first by a paired bootstrap. Earlier evaluations by these options count.",
        ),
    ] = False,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    """Translate with a run's checkpoint by beam search and score it (BLEU, chrF); --paired tests the difference of
    runs."""
    from .. import decode
    from ..store import Run

    if paired:
        if len(runs) < 2:
            raise UsageError("--paired compares runs: give at least two.")
    elif len(runs) > 1:
        raise UsageError("give one run at a time, or --paired to compare several.")
    options = {
        "data": data, "beam": beam, "length_penalty": length_penalty, "penalty_kind": penalty_kind,
        "sentences": sentences, "max_length": max_length,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    results = {}
    for run in runs:
        if paired and (found := _earlier(Run.open(run), given)) is not None:
            if lacking := [key for key in SHOWN if key not in found]:
                told = f"{run / 'evaluation.json'} holds half an evaluation (no {lacking[0]})"
                raise InputError(f"{told}: run stabilitylab evaluate {run} again.")
            results[str(run)] = found
            continue
        console = screen(stderr=True)
        with Progress(console=console, disable=quiet or not console.is_terminal) as progress:
            bar = progress.add_task("sentences", total=None)
            results[str(run)] = decode.evaluate(
                run,
                **given,
                device=device,
                progress=lambda done, total, bar=bar: progress.update(bar, completed=done, total=total),
            )
    comparison = decode.paired(*runs) if paired else None
    if as_json:
        only = next(iter(results.values()))
        print(json.dumps({"evaluations": results, "paired": comparison} if paired else only, indent=2))
        return
    for path, result in results.items():
        _show(path, result, quiet or paired)
    if comparison is not None:
        print(json.dumps(comparison, indent=2))


def _earlier(run: Run, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the evaluation of a run, if it was made with the given options and the run was not trained further since;
    else None."""
    found = run.evaluation
    if found is None or found.get("row", run.status.step) != run.status.step:
        return None
    return found if all(found.get(name, value) == value for name, value in given.items()) else None


def _show(path: str, result: dict, short: bool) -> None:
    console = screen(soft_wrap=True, piped=160)
    for line in (
        f"{path}: BLEU {result['bleu']:.2f}, chrF {result['chrf']:.2f} on {_text(result)}",
        f"  {result['signature']}; beam {result['beam']}, length penalty {result['length_penalty']:g} "
        f"({result['penalty_kind']}), after {result['row']} updates"
        + ("" if result["alpha"] is None else f", alpha {result['alpha']:g}"),
    ):
        console.print(line)
    if not short:
        for example in result.get("examples", ()):
            console.print()
            for key, text in example.items():
                console.print(f"  {key:<10} {text}")


def _text(result: dict) -> str:
    """Describe the translated text, and the number of cut sentences: a source that is cut lowers the score."""
    text, cut = f"{result['sentences']} sentences", result["truncated"]
    where = f"{result['max_length']} tokens" if "max_length" in result else "data.max_length"
    return f"{text}, {cut} of them cut at {where} (--max-length N takes more)" if cut else text
