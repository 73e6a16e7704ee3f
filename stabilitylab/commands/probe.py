"""``probe``: train a reference Transformer and record its stability."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from ..errors import DivergedError, UsageError
from ..inputs import shown
from ..printable import screen
from ._options import JSON, RUNS, given_flags
from .base import command

if TYPE_CHECKING:
    from ..config import Config
    from ..terminal import LiveDisplay
    from ..train import Result

AUTO = "auto"

_model, _data, _training, _probes, _run = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Data", "Training", "Probes", "Run")
)


@command("probe", rank=10, exit_codes=True)
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
        _model(
            metavar="STACK",
            help="encoder-decoder translates, encoder predicts masked tokens, decoder the next ones (both on the text "
            "of the target side).",
        ),
    ] = None,
    model: Annotated[
        Literal["transformer", "gpt2", "llama"] | None,
        _model(help="Take positions, activation, norm and biases from this model; gpt2 and llama are decoders alone."),
    ] = None,
    preset: Annotated[
        str | None,
        _model(
            help="Width, feed-forward width and heads: tiny (64, 128, 2), small (256, 1024, 4), base (512, 2048, 8).",
            show_default="tiny",
        ),
    ] = None,
    data: Annotated[
        str | None,
        _data(
            help="synthetic, text:SRC,TGT (plain or .gz), text:FILE (a single stack) or hf:DATASET,SRC,TGT; 'list "
            "sources' has all.",
            show_default="synthetic",
        ),
    ] = None,
    valid: Annotated[str | None, _data(help="Held-out SRC,TGT files or FILE (text), or split (hf).")] = None,
    steps: Annotated[int | None, _training(help="Optimizer updates.", show_default="by preset")] = None,
    lr: Annotated[float | None, _training(help="Peak learning rate.", show_default="by preset")] = None,
    # The configuration checks the least value: a range here would widen a column at the cost of the names.
    warmup: Annotated[int | None, _training(help="Updates of the warm-up; 0: none.", show_default="by preset")] = None,
    seed: Annotated[int | None, _training(help="Seed of weights, dropout and data order.", show_default="0")] = None,
    device: Annotated[str | None, _training(help="auto, cpu, cuda or cuda:N.", show_default="auto")] = None,
    cuda_graphs: Annotated[
        Literal["auto", "on", "off"] | None,
        _training(help="Replay whole updates on a GPU; auto: wherever they can be recorded.", show_default="auto"),
    ] = None,
    compile_: Annotated[
        Literal["auto", "on", "off"] | None,
        _training("--compile", help="Compile the layers; auto: off until measured on CUDA.", show_default="auto"),
    ] = None,
    parallel: Annotated[
        Literal["none", "ddp", "fsdp"] | None,
        _training(
            help="What each process of torchrun holds: a replica of the model (ddp) or a shard (fsdp).",
            show_default="none",
        ),
    ] = None,
    activation_checkpointing: Annotated[
        bool, _training("--activation-checkpointing", help="Less memory, more time: layers are computed twice.")
    ] = False,
    threads: Annotated[int | None, _training(help="CPU threads of one operator.", show_default="1")] = None,
    on_divergence: Annotated[
        Literal["continue", "stop"] | None,
        _training(help="What to do after a divergence.", show_default="continue"),
    ] = None,
    fail_on_divergence: Annotated[bool, _training("--fail-on-divergence", help="Exit 3 if the run diverged.")] = False,
    probes: Annotated[
        str | None, _probes(help="Comma-separated: default, standard, all, none, NAME, -NAME.", show_default="default")
    ] = None,
    every: Annotated[
        str | None, _probes(help="Record every N steps, or log: steps 0 to 11, then 10 % apart.", show_default="log")
    ] = None,
    curvature_every: Annotated[
        str | None,
        _probes(
            help="The same for the probes of curvature (such as critical_sharpness); N, log or auto.",
            show_default="auto: every 200, from 20,000 on 1 % apart",
        ),
    ] = None,
    record: Annotated[
        bool, _probes("--record", help="Keep snapshots and batches, so that 'explain' can replay the run.")
    ] = False,
    out: Annotated[Path, _run(help="Folder of run directories.")] = RUNS,
    name: Annotated[str | None, _run(help="Name of the run directory.", show_default="arch-depth-seed")] = None,
    resume: Annotated[
        str | None,
        _run(
            metavar="RUN|auto",
            help="Continue this run, with no other setting than --steps. auto: start the run that this command "
            "describes, or continue it if it has begun.",
        ),
    ] = None,
    config: Annotated[Path | None, _run(help="TOML file with sections model, data, train, probes.")] = None,
    set_: Annotated[
        list[str] | None, _run("--set", metavar="SECTION.KEY=VALUE", help="Any setting, such as train.lr=1e-3.")
    ] = None,
    dry_run: Annotated[bool, _run("--dry-run", help="Print configuration, parameters, memory; train nothing.")] = False,
    show: Annotated[str, _run(metavar="PROBE", help="Show the layers of this probe in the live panel.")] = "grad_norm",
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, _run("-q", "--quiet", help="Show no progress, print only the run's path.")] = False,
    verbose: Annotated[bool, _run("-v", "--verbose", help="Log more; show tracebacks.")] = False,
) -> int:
    """Train a reference Transformer and record its stability, layer by layer."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    every_flag = {
        "preset": preset,
        "model": {
            "arch": arch,
            "decoder_arch": decoder_arch,
            "stack": stack,
            "design": model,
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
        },
        "data": {"source": data, "valid": valid, "seed": seed},
        "train": {
            "steps": steps,
            "lr": lr,
            "warmup": warmup,
            "seed": seed,
            "device": device,
            "cuda_graphs": cuda_graphs,
            "compile": compile_,
            "parallel": parallel,
            "activation_checkpointing": activation_checkpointing or None,
            "threads": threads,
            "on_divergence": on_divergence,
        },
        "probes": {
            "every": _every(every),
            "update_every": _every(every),
            "curvature_every": _every(curvature_every),
            "names": _names(probes),
            "record": record or None,
        },
    }
    flags = given_flags(every_flag)
    if show != "grad_norm":
        from ..probes import PROBES

        show = PROBES.resolve(show)
    if resume not in (None, AUTO):
        steps_only = not flags.get("train", {}).keys() - {"steps"}
        if set(flags) - {"train"} or not steps_only or depth or set_ or config or name or dry_run:
            raise UsageError("--resume continues a run with its own configuration: only --steps may go with it.")
        return _resume(Path(resume), steps, fail_on_divergence, as_json, quiet, show)
    from ..config import parse_set, read_config_file, resolve
    from ..store.layout import is_run_name

    if name is not None and not is_run_name(name):
        raise UsageError(
            f"--name {shown(name)} cannot name a run directory: give one name without slashes; --out is its folder."
        )
    settings = resolve(read_config_file(config) if config else {}, flags, parse_set(set_ or ()), depth=depth)
    if dry_run:
        return _dry_run(settings, as_json)
    if resume == AUTO:
        from . import _resuming as resuming

        job = resuming.found(settings, out, name)
        if job.state == "finished":
            return resuming.say_ended(job.path, fail_on_divergence, as_json, quiet)
        if job.resumable:
            return _resume(job.path, settings.train.steps, fail_on_divergence, as_json, quiet, show)
        name = job.name
    return _start(settings, out, name, fail_on_divergence, as_json, quiet, show)


def _every(text: str | None) -> int | str | None:
    """Return a number as int; the configuration refuses any other text."""
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _start(config: Config, out: Path, name: str | None, fail: bool, as_json: bool, quiet: bool, shown: str) -> int:
    """Train, record, summarise; return the exit code."""

    def go(display: LiveDisplay) -> Result:
        from .. import train

        return train.start(train.plan(config), out, name, display)

    return _watched(go, fail, as_json, quiet, shown)


def _resume(path: Path, steps: int | None, fail: bool, as_json: bool, quiet: bool, shown: str) -> int:
    """Continue a run; return the exit code."""

    def go(display: LiveDisplay) -> Result:
        from .. import train

        return train.resume(path, steps, display)

    return _watched(go, fail, as_json, quiet, shown)


def _dry_run(config: Config, as_json: bool) -> int:
    """Print what ``probe`` would do."""
    from .. import train
    from ..labels import label

    plan = train.plan(config)
    if not plan.team.first:
        return 0
    facts = {
        "run": label(config.model),
        "config": config.model_dump(mode="json"),
        "data": plan.dataset.describe(),
        "device": str(plan.device),
        "parameters": plan.footprint.parameters,
        "memory_bytes": {
            "state": plan.footprint.state,
            "activations": plan.footprint.activations,
            "graphs": plan.footprint.graphs,
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
    for key, value in _data_rows(facts["data"]):
        table.add_row(f"({key})", value)
    table.add_row("device", facts["device"])
    table.add_row("parameters", f"{plan.footprint.parameters:,}")
    table.add_row(
        "memory",
        f"about {plan.footprint.total / 2**30:.2f} GiB: state {plan.footprint.state / 2**30:.2f}, "
        f"activations {plan.footprint.activations / 2**30:.2f}"
        + (f", CUDA graphs up to {plan.footprint.graphs / 2**30:.2f}" if plan.footprint.graphs else ""),
    )
    screen(soft_wrap=True).print(table)
    return 0


def _data_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts about the data. A single stack reads one side of them, so that it has no source and no pairs."""
    if data["stack"] == "encoder-decoder":
        yield from ((key, str(value)) for key, value in data.items() if key != "rows")
        return
    names = {"target_vocab": "vocab", "pairs": "rows", "tokens_per_sentence": "tokens_per_row"}
    for key, value in data.items():
        if key == "pairs" and data["rows"].startswith("blocks"):
            value = f"{value} {data['rows']}"
        elif key == "tokens_per_sentence":
            value = value["target"]
        elif key == "buckets":
            value = [{"of" if name == "pairs" else name: one for name, one in bucket.items()} for bucket in value]
        if key not in ("source_vocab", "joint", "rows"):
            yield names.get(key, key), str(value)


def _watched(go: Callable[[LiveDisplay], Result], fail: bool, as_json: bool, quiet: bool, show: str) -> int:
    from ..terminal import LiveDisplay

    with LiveDisplay(screen(stderr=True), quiet, show) as display:
        result = go(display)
    from ..probes.parameters.ranks import is_first_rank

    if not is_first_rank():  # another rank has nothing to show
        return 128 + result.signal if result.signal is not None else 0
    return _finish(result, fail, as_json, quiet)


def _finish(result: Result, fail: bool, as_json: bool, quiet: bool) -> int:
    from ..store import Run
    from ._outcome import print_outcome, print_summary

    if result.signal == signal.SIGHUP:  # the terminal is gone, so nobody would read the output
        return 128 + signal.SIGHUP
    run = Run.open(result.path)
    verdict = result.verdict
    if as_json:
        print_outcome(run, result.state, result.row, verdict.recorded() if verdict else None)
    elif not quiet:
        print_summary(run, result)
    else:
        print(result.path)
    if result.signal is not None:
        return 128 + result.signal
    if fail and verdict is not None and verdict.state == "diverged":
        raise DivergedError(f"the run diverged: {verdict.reason} ({result.path}).")
    return 0
