"""``list`` and ``runs``: the available choices, and the runs that exist."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import track

from ..errors import InputError, UsageError, in_words
from ..printable import screen
from ..registry import Registry, failed
from ._options import JSON, RUNS
from .base import COMMANDS, command

if TYPE_CHECKING:
    from ..alarm.signal import Signal
    from ..store import Run


KINDS = ("archs", "probes", "figures", "detectors", "signals", "sources", "sweeps", "commands", "presets")


@command("list", rank=120)
def list_(
    what: Annotated[
        str | None, typer.Argument(metavar="WHAT", help=f"One of {', '.join(KINDS)}.", show_default="all of them")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="Show this entry alone, with all that is known about it.")] = None,
    depth: Annotated[int, typer.Option(min=1, help="Layers for which 'archs' prints constants.")] = 200,
    stack: Annotated[
        Literal["encoder-decoder", "encoder", "decoder"],
        typer.Option(metavar="STACK", help="The stack of these constants: encoder-decoder, encoder or decoder."),
    ] = "encoder-decoder",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List architectures, probes, figures, detectors, signals, data sources, sweeps, commands and presets, a line each.

    With a name, show everything that is known about that entry."""
    from ..config import depth_layers  # here, since it takes its time

    layers = depth_layers(depth, stack)
    if name is not None:
        _one(str(what), name, layers, f"{depth} layers, {stack}", as_json)
        return
    known = catalogue(*layers)
    if what not in (None, *known):
        raise UsageError(f"there is no list of {what!r}: give one of {', '.join(known)}.")
    listing = {kind: entries for kind, entries in known.items() if what in (None, kind)}
    origins = {
        kind: {name: registry.origin(name) for name in registry} for kind, registry in registries(listing).items()
    }
    if as_json:
        print(json.dumps({**listing, "from": origins, "left_out": failed}, indent=2))
        return
    console = screen(piped=200)
    for kind, entries in listing.items():
        console.print(f"{kind}:" if what is None else "", style="bold", end="\n" if what is None else "")
        longest = max(map(len, entries), default=0)
        for entry, text in entries.items():
            said = text if isinstance(text, str) else f"{text['formula']}  ({text['source']})"
            origin = origins.get(kind, {}).get(entry, "stabilitylab")
            said += "" if origin == "stabilitylab" else f"  [{origin}]"
            console.print(
                f"  {entry:<{longest}}  {shortened(said, console.width - longest - 4)}",
                soft_wrap=True,
            )
    if what in ("archs", "probes"):
        print(f"to see all about one entry: stabilitylab list {what} NAME", file=sys.stderr)
    for plugin, why in failed.items():
        print(f"left out: {plugin} cannot be imported ({why})", file=sys.stderr)


def shortened(text: str, width: int) -> str:
    """Return as many whole sentences as fit, or else as many whole words."""
    if len(text) <= width:
        return text
    if ends := [end.end() for end in re.finditer(r"\.(?= [A-Z`])", text) if end.end() <= width]:  # no "et al. 2025"
        return text[: ends[-1]]
    return f"{text[: max(1, width - 2)].rpartition(' ')[0].rstrip(' ,;:(')} …"


def _one(kind: str, name: str, layers: tuple[int, int], at: str, as_json: bool) -> None:
    """Print everything that is known of one entry."""
    from ..models.facts import facts

    registry = registries([kind]).get(kind)
    if registry is None:
        raise UsageError(f"'list {kind} {name}': give one of {', '.join(registries(KINDS))} before the name.")
    known = registry.resolve(name)
    if kind == "archs":
        found = facts(known, *layers)
        told = arch_lines(found, at)
    else:
        entry = registry[known]
        text = signal_line(entry) if kind == "signals" else inspect.getdoc(_told(entry)) or str(entry)
        found, told = {"text": text}, text.splitlines()
    if as_json:
        print(json.dumps({known: found, "from": registry.origin(known)}, indent=2))
        return
    print("\n".join([known, *(f"    {line}".rstrip() for line in [*told, f"from: {registry.origin(known)}"])]))


def _told(entry: Any) -> Any:
    """Return the function of an entry, whose docstring is about it; the entry itself if it is a class."""
    return next(
        (found for name in ("function", "find", "load", "runs") if (found := getattr(entry, name, None))), entry
    )


def signal_line(signal: Signal) -> str:
    """Return a line on a signal: its title, the column that it reads, and the kinds of its readings."""
    where = f"{signal.table}.{signal.column}" if signal.table else f"the metric {signal.column}"
    return f"{signal.title}; reads {where}, as {', '.join(signal.readings)}"


def _others(choices: Sequence[Any], value: Any) -> str:
    """Return the other values that an option may have, in parentheses; "" for an option without a choice."""
    other = [str(choice) for choice in choices if choice != value]
    return f" (or {', '.join(other)})" if other else ""


def arch_lines(facts: dict[str, Any], at: str) -> list[str]:
    """Return formula, source, extras, remarks and constants of an architecture, a line each; ``at`` names the depth."""
    constants = [
        f"{stack}: " + ", ".join(f"{name} = {value:.6g}" for name, value in values.items())
        for stack, values in facts["constants"].items()
        if values
    ]
    lines = [facts["formula"], f"source: {facts['source']}", f"learns besides: {facts['learns']}"]
    if facts["remarks"]:
        lines.append(f"remarks: {facts['remarks'].replace('``', '`')}")
    lines.append(f"initial gains: {facts['gains']}")
    if facts["options"]:
        shown = (
            f"arch.{name} = {value}" + _others(facts["choices"].get(name, ()), value)
            for name, value in facts["options"].items()
        )
        lines.append(f"options (--set): {', '.join(shown)}")
    if constants:
        lines.append(f"at {at}: " + "; ".join(constants))
    lines += [f"at {at}: the {stack} equals that of {other}" for stack, other in facts["equal"].items()]
    if not facts["constants"]:
        lines.append(f"defined for {' and '.join(facts['defined_for'])} models only")
    return lines


@command("runs", rank=130)
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of run directories.")] = RUNS,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show a table of run directories with their state.

    The trials of a search of lr-find are counted below the table; its own folder lists them.
    """
    rows = run_table(folder)
    if as_json:
        print(json.dumps({"runs": rows}, indent=2))
        return
    if not rows:
        print(f"no runs below {folder}", file=sys.stderr)
        return
    from ..terminal import Field, print_table

    columns = [
        Field("run"), Field("state", need=6, state=True), Field("verdict", need=9, state=True),
        Field("arch", need=5), Field("layers", need=4), Field("data", need=1), Field("seed", need=2, right=True),
        Field("step", need=7, right=True), Field("nll - unigram", need=8, right=True),
    ]  # fmt: skip
    console = screen(piped=200)
    trials = Counter(row["search"] for row in rows if row["search"] is not None)
    rows = [row for row in rows if row["search"] is None]
    if rows:
        print_table(console, columns, [[str(row[column.name]) for column in columns] for row in rows])
    for search, count in trials.items():
        path = folder / search
        told = f"{count} trial{'s' * (count > 1)} of lr-find: stabilitylab runs {path} lists them"
        console.print(f"{search}: {told}", soft_wrap=True)
    for row in rows:
        if row["state"] in ("failed", "interrupted", "unreadable") or row["verdict"] == NOT_FINITE:
            print(f"{row['run']}: {row['reason']}", file=sys.stderr)
    if any(row["state"] == "finished" and row["verdict"] == "-" for row in rows):
        print("A run without a validation loss has no verdict: run stabilitylab diagnose RUN.", file=sys.stderr)


def catalogue(encoder_layers: int, decoder_layers: int) -> dict[str, dict[str, Any]]:
    """Return archs (with their facts) and the entries of all other kinds (one line each), read from the registries."""
    from ..config import PRESETS, ModelConfig
    from ..models.facts import facts

    def first_line(entry: Any) -> str:
        return (inspect.getdoc(entry) or "").split("\n\n")[0].replace("\n", " ")

    base = ModelConfig()
    presets = {}
    for name, sections in PRESETS.items():
        model = base.model_copy(update=sections.get("model", {}))
        presets[name] = f"{model.d_model}-{model.d_ffn}-{model.heads}"
    known = registries(KINDS)
    return {
        "archs": {name: facts(name, encoder_layers, decoder_layers) for name in sorted(known["archs"])},
        "probes": {name: first_line(one) for name, one in sorted(known["probes"].items())},
        "figures": {id: f"{one.title} ({one.source})" for id, one in sorted(known["figures"].items())},
        "detectors": {kind: f"{one.title}; reads {', '.join(one.reads)}" for kind, one in known["detectors"].items()},
        "signals": {name: signal_line(one) for name, one in known["signals"].items()},
        "sources": {name: f"{one.form}: {first_line(one.load)}" for name, one in known["sources"].items()},
        "sweeps": {name: first_line(one.runs) for name, one in sorted(known["sweeps"].items())},
        "commands": {name: first_line(one.function) for name, one in sorted(known["commands"].items())},
        "presets": presets,
    }


def registries(kinds: Iterable[str]) -> dict[str, Registry[Any]]:
    """Return the registries of these kinds; presets have none."""
    from ..alarm import SIGNALS
    from ..data.source import SOURCES
    from ..diagnose.events import DETECTORS
    from ..experiments import SWEEPS
    from ..models import ARCHS
    from ..probes import PROBES
    from ..reports.base import FIGURES

    known: dict[str, Registry[Any]] = {"archs": ARCHS, "probes": PROBES, "figures": FIGURES}
    known |= {"detectors": DETECTORS, "signals": SIGNALS, "sources": SOURCES, "sweeps": SWEEPS, "commands": COMMANDS}
    return {kind: known[kind] for kind in kinds if kind in known}


def run_table(folder: Path) -> list[dict[str, Any]]:
    """Return one dictionary for each run directory below ``folder``.

    ``search`` is the folder of the search, seen from ``folder``, if the run is a trial of a search below it, or None.
    """
    from ..lr_find.folder import is_search
    from ..store import load_runs
    from ..store.reader import of_snapshots

    if not folder.is_dir():
        raise InputError(f"no folder {folder}: make runs with 'stabilitylab probe', or name their folder.")
    broken: list[tuple[Path, str]] = []
    rows = []
    console = screen(stderr=True)
    found = load_runs(folder, broken)
    for run in track(found, "reading", console=console, disable=not console.is_terminal, transient=True):
        try:
            rows.append({**of_snapshots(_described, run), "run": _below(folder, run.path)})
        except InputError as error:
            broken.append((run.path, str(error)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # settings of a type that we do not write
            broken.append((run.path, f"its configuration is damaged ({type(error).__name__}: {error})"))
        except Exception as error:  # any error of one run must not hide the others
            broken.append((run.path, f"it cannot be read ({in_words(error)})"))
    for path, sentence in broken:
        told = {"run": _below(folder, path), "state": "unreadable", "reason": sentence}
        rows.append({**dict.fromkeys(DESCRIBED, "-"), **told})
    for row in rows:
        parent = Path(row["run"]).parent
        row["search"] = str(parent) if parent != Path() and is_search(folder / parent) else None
    return rows


def _below(folder: Path, run: Path) -> str:
    """Return the path of a run below ``folder``, or its name if that is the folder itself."""
    return str(run.relative_to(folder)) if folder in run.parents else run.name


NOT_FINITE = "not finite"  # the verdict on a run without held-out data, which was not judged
DESCRIBED = ("run", "state", "verdict", "arch", "layers", "width", "data", "seed", "step", "nll - unigram", "reason")


def _described(run: Run) -> dict[str, Any]:
    from ..labels import label_of  # here, since it takes its time
    from ..store.nonfinite import lost
    from ..terminal import signed

    status, sections = run.status, run.config if run.kind != "watched" else {}
    model, train = sections.get("model", {}), sections.get("train", {})
    verdict = run.verdict
    broken = "" if verdict or run.kind == "onestep" else lost(run)
    values = (
        run.name,
        status.state,
        verdict.state if verdict else NOT_FINITE if broken else "-",
        label_of(run.manifest) or "-",
        f"{model['encoder_layers']}+{model['decoder_layers']}" if "encoder_layers" in model else "-",
        model.get("d_model", "-"),
        sections.get("data", {}).get("source", "-").split(":")[0],
        train.get("seed", "-"),
        f"{status.step}/{train['steps']}" if "steps" in train and run.kind != "onestep" else str(status.step),
        signed(verdict.nll_gap) if verdict else "-",
        verdict.reason if verdict else "; ".join(filter(None, (status.reason, broken))),
    )
    return dict(zip(DESCRIBED, values, strict=True))
