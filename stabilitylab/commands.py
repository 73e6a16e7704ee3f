"""What each command does once its arguments are parsed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .config import PRESETS, Config, ModelConfig
from .errors import DivergedError, InputError
from .labels import label
from .terminal import Display, summary

if TYPE_CHECKING:
    from .store import Run
    from .train import Result


def probe(config: Config, out: Path, name: str | None, fail: bool, as_json: bool, quiet: bool) -> int:
    """Train, record, summarise; returns the exit code."""
    from . import train

    plan = train.plan(config)
    return _watched(lambda display: train.start(plan, out, name, display), fail, as_json, quiet)


def resume(path: Path, steps: int | None, fail: bool, as_json: bool, quiet: bool) -> int:
    """Continue a run; returns the exit code."""
    from . import train

    return _watched(lambda display: train.resume(path, steps, display), fail, as_json, quiet)


def dry_run(config: Config, as_json: bool) -> int:
    """Print what ``probe`` would do."""
    from . import train

    plan = train.plan(config)
    facts = {
        "run": label(config.model),
        "config": config.model_dump(mode="json"),
        "data": plan.dataset.describe(),
        "device": str(plan.device),
        "parameters": plan.footprint.parameters,
        "memory_bytes": {
            "state": plan.footprint.state,
            "activations": plan.footprint.activations,
            "total": plan.footprint.total,
        },
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    table = Table.grid(padding=(0, 2))
    for section, values in facts["config"].items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            table.add_row(f"{section}.{key}".rstrip("."), str(value))
    for key, value in facts["data"].items():
        table.add_row(f"({key})", str(value))
    table.add_row("device", facts["device"])
    table.add_row("parameters", f"{plan.footprint.parameters:,}")
    table.add_row(
        "memory",
        f"about {plan.footprint.total / 2**30:.2f} GiB: state {plan.footprint.state / 2**30:.2f}, "
        f"activations {plan.footprint.activations / 2**30:.2f}",
    )
    Console(soft_wrap=True).print(table, highlight=False, markup=False)
    return 0


def catalogue() -> dict[str, dict[str, str]]:
    """Archs, probes and presets with one line each, read from the registries."""
    from .models import ARCHS
    from .probes import PROBES

    def first_line(entry: type) -> str:
        return (inspect.getdoc(entry) or "").split("\n\n")[0].replace("\n", " ")

    base = ModelConfig()
    presets = {}
    for name, sections in PRESETS.items():
        model = base.model_copy(update=sections.get("model", {}))
        presets[name] = f"{model.d_model}-{model.d_ffn}-{model.heads}"
    return {
        "archs": {name: first_line(ARCHS[name]) for name in sorted(ARCHS)},
        "probes": {name: first_line(PROBES[name]) for name in sorted(PROBES)},
        "presets": presets,
    }


def run_table(folder: Path) -> list[dict[str, Any]]:
    """One dictionary a run directory below ``folder``."""
    from .store import load_runs

    if not folder.is_dir():
        raise InputError(f"no folder {folder}: make runs with 'stabilitylab probe', or name their folder.")
    broken: list[tuple[Path, str]] = []
    rows = []
    for run in load_runs(folder, broken):
        try:
            rows.append(_described(run))
        except InputError as error:
            broken.append((run.path, str(error)))
    for path, sentence in broken:
        rows.append({**dict.fromkeys(DESCRIBED, "-"), "run": path.name, "state": "unreadable", "reason": sentence})
    return rows


DESCRIBED = ("run", "state", "verdict", "arch", "layers", "width", "data", "seed", "step", "nll - unigram", "reason")


def _described(run: Run) -> dict[str, Any]:
    status, sections = run.status, run.config
    model, train = sections.get("model", {}), sections.get("train", {})
    verdict = status.facts.get("verdict") or {}
    values = (
        run.name,
        status.state,
        verdict.get("state", "-"),
        run.manifest.get("label", "-"),
        f"{model['encoder_layers']}+{model['decoder_layers']}" if model else "-",
        model.get("d_model", "-"),
        sections.get("data", {}).get("source", "-").split(":")[0],
        train.get("seed", "-"),
        f"{status.step}/{train['steps']}" if train else str(status.step),
        f"{float(verdict['nll_gap']):+.3f}" if verdict else "-",
        status.reason,
    )
    return dict(zip(DESCRIBED, values, strict=True))


def _watched(go: Callable[[Display], Result], fail: bool, as_json: bool, quiet: bool) -> int:
    with Display(Console(stderr=True), quiet) as display:
        result = go(display)
    return _finish(result, fail, as_json, quiet)


def _finish(result: Result, fail: bool, as_json: bool, quiet: bool) -> int:
    from .store import Run
    from .store.layout import plain

    run = Run.open(result.path)
    verdict = result.verdict
    if as_json:
        head, body = summary(run)
        facts = {
            "run": str(result.path),
            "state": result.state,
            "step": result.row,
            "verdict": asdict(verdict) if verdict else None,
            "summary": [dict(zip(head, line, strict=True)) for line in body],
        }
        print(json.dumps(plain(facts), indent=2))
    elif not quiet:
        _print_summary(run, result)
    else:
        print(result.path)
    if result.signal is not None:
        return 128 + result.signal
    if fail and verdict is not None and verdict.state == "diverged":
        raise DivergedError(f"the run diverged: {verdict.reason} ({result.path}).")
    return 0


def _print_summary(run: Any, result: Result) -> None:
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    head, body = summary(run)
    if body:
        table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold")
        for i, column in enumerate(head):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        shown = ""
        for name, *cells in body:
            table.add_row("" if name == shown else name, *cells)
            shown = name
        console.print(table, highlight=False, markup=False)
        console.print()
    verdict = result.verdict
    if verdict is None:
        text = f"interrupted after {result.row} updates; continue with: stabilitylab probe --resume {result.path}"
    else:
        text = (
            f"{verdict.state} since step {verdict.step}: {verdict.reason} "
            f"(held-out nll - unigram {verdict.nll_gap:+.3f}, accuracy - unigram {verdict.accuracy_gap:+.3f})"
        )
    console.print(text, highlight=False, markup=False)
    console.print(f"run: {result.path}", highlight=False, markup=False)
