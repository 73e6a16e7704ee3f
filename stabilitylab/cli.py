"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from . import __version__
from .errors import StabilityLabError, UsageError

EXIT_CODES = """\
Exit codes: 0 ok; 1 a check failed or internal error; 2 usage or configuration; 3 diverged under --fail-on-divergence;
4 input, data or run missing or unreadable; 5 environment (no CUDA, no space, a missing extra); 130 / 143 stopped by
Ctrl-C / SIGTERM, after a flush and a checkpoint."""

app = typer.Typer(
    name="stabilitylab",
    help="Will a deep Transformer train, which layer breaks first, and why.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
CommandLineError: Any = typer.BadParameter.__mro__[
    2
]  # click's own base class, which typer vendors from some version on
RUNS = Path("runs")
JSON = typer.Option("--json", help="Print one JSON object on stdout.")
_model, _data, _training, _probes, _run = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Data", "Training", "Probes", "Run")
)


def main() -> None:
    """Entry point: errors of ours become one sentence on stderr and their exit code."""
    verbose = any(flag in sys.argv[1:] for flag in ("-v", "--verbose"))
    try:
        code = app(standalone_mode=False)
    except StabilityLabError as error:
        code = _complain(error, error.exit_code, verbose)
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("stopped by Ctrl-C; what was recorded is kept.", 130, verbose)
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    except Exception as error:
        if isinstance(error, CommandLineError):
            message = error.format_message()  # type: ignore[attr-defined]
            code = _complain(f"{message} (see --help)", 2, verbose) if message else 2  # a bare call showed its help
        else:
            code = _complain(f"internal error: {type(error).__name__}: {error} (-v shows where).", 1, verbose)
    sys.exit(code or 0)


def _complain(message: object, code: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    print(f"stabilitylab: {message}", file=sys.stderr)
    return code


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option("--version", help="Print the version.", callback=lambda value: _version(value), is_eager=True),
    ] = None,
) -> None: ...


def _version(asked: bool | None) -> None:
    if asked:
        print(f"stabilitylab {__version__}")
        raise typer.Exit


@app.command(epilog=EXIT_CODES)
def probe(
    arch: Annotated[
        str | None, _model(help="Architecture, see 'stabilitylab list'.", show_default="branchnorm")
    ] = None,
    decoder_arch: Annotated[str | None, _model(help="Another architecture for the decoder.")] = None,
    depth: Annotated[
        int | None, _model(help="Layers in all: 200 is 100 encoder and 100 decoder layers.", show_default="200")
    ] = None,
    encoder_layers: Annotated[int | None, _model(help="Encoder layers, instead of --depth.")] = None,
    decoder_layers: Annotated[int | None, _model(help="Decoder layers, instead of --depth.")] = None,
    stack: Annotated[
        Literal["encoder-decoder", "encoder", "decoder"] | None,
        _model(help="Translation, masked tokens or next tokens (these two on the target side's text)."),
    ] = None,
    preset: Annotated[
        str | None, _model(help="tiny (64-128-2), small (256-1024-4) or base (512-2048-8).", show_default="tiny")
    ] = None,
    data: Annotated[
        str | None,
        _data(help="synthetic, text:SRC,TGT (plain or .gz) or hf:DATASET,SRC,TGT.", show_default="synthetic"),
    ] = None,
    valid: Annotated[str | None, _data(help="Held-out SRC,TGT files (text) or split (hf).")] = None,
    steps: Annotated[int | None, _training(help="Optimizer updates.", show_default="by preset")] = None,
    seed: Annotated[int | None, _training(help="Seed of weights, dropout and data order.", show_default="0")] = None,
    device: Annotated[str | None, _training(help="auto, cpu, cuda or cuda:N.", show_default="auto")] = None,
    threads: Annotated[int | None, _training(help="CPU threads of one operator.", show_default="1")] = None,
    on_divergence: Annotated[
        Literal["continue", "stop"] | None, _training(help="What to do then.", show_default="continue")
    ] = None,
    fail_on_divergence: Annotated[bool, _training("--fail-on-divergence", help="Exit 3 if it diverged.")] = False,
    probes: Annotated[
        str | None, _probes(help="Comma-separated: default, all, none, NAME, -NAME.", show_default="default")
    ] = None,
    every: Annotated[
        str | None, _probes(help="Every N steps, or log: 0..11, then 10 % apart.", show_default="log")
    ] = None,
    out: Annotated[Path, _run(help="Folder of run directories.")] = RUNS,
    name: Annotated[str | None, _run(help="Name of the run directory.", show_default="arch-depth-seed")] = None,
    resume: Annotated[Path | None, _run(help="Continue this run; only --steps may go with it.")] = None,
    config: Annotated[Path | None, _run(help="TOML file with sections model, data, train, probes.")] = None,
    set_: Annotated[
        list[str] | None, _run("--set", metavar="SECTION.KEY=VALUE", help="Any setting, such as train.lr=1e-3.")
    ] = None,
    dry_run: Annotated[bool, _run("--dry-run", help="Print configuration, parameters, memory; train nothing.")] = False,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, _run("-q", "--quiet", help="No progress, only the run's path.")] = False,
    verbose: Annotated[bool, _run("-v", "--verbose", help="Log more; show tracebacks.")] = False,
) -> int:
    """Train a reference Transformer and record its stability, layer by layer."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    flags: dict[str, Any] = {
        "preset": preset,
        "model": {
            "arch": arch,
            "decoder_arch": decoder_arch,
            "stack": stack,
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
        },
        "data": {"source": data, "valid": valid, "seed": seed},
        "train": {"steps": steps, "seed": seed, "device": device, "threads": threads, "on_divergence": on_divergence},
        "probes": {"every": _every(every), "update_every": _every(every), "names": _names(probes)},
    }
    flags = _given(flags)
    from . import commands

    if resume is not None:
        steps_only = not flags.get("train", {}).keys() - {"steps"}
        if set(flags) - {"train"} or not steps_only or depth or set_ or config or name or dry_run:
            raise UsageError("--resume continues a run with its own configuration: only --steps may go with it.")
        return commands.resume(resume, steps, fail_on_divergence, as_json, quiet)
    from .config import parse_set, read_config_file, resolve

    settings = resolve(read_config_file(config) if config else {}, flags, parse_set(set_ or ()), depth=depth)
    if dry_run:
        return commands.dry_run(settings, as_json)
    return commands.probe(settings, out, name, fail_on_divergence, as_json, quiet)


@app.command("list")
def list_(
    what: Annotated[Literal["archs", "probes", "presets"] | None, typer.Argument(help="Only these.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Architectures, probes and presets, with their definitions."""
    from .commands import catalogue

    listing = {kind: entries for kind, entries in catalogue().items() if what in (None, kind)}
    if as_json:
        print(json.dumps(listing, indent=2))
        return
    console = Console()
    for kind, entries in listing.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for entry, text in entries.items():
            table.add_row(entry, text)
        console.print(table, highlight=False, markup=False)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of run directories.")] = RUNS,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """A table of run directories with their state."""
    from .commands import run_table

    rows = run_table(folder)
    if as_json:
        print(json.dumps({"runs": rows}, indent=2))
        return
    columns = ("run", "state", "verdict", "arch", "layers", "data", "seed", "step", "nll - unigram")
    table = Table(*columns, box=None, padding=(0, 1), header_style="bold")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(table, highlight=False, markup=False)
    for row in rows:
        if row["state"] in ("failed", "interrupted", "unreadable"):
            print(f"{row['run']}: {row['reason']}", file=sys.stderr)


def _every(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else text


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Without what was not given, so that presets and files keep their say."""
    trimmed = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in flags.items()
    }
    return {key: value for key, value in trimmed.items() if value not in (None, {})}
