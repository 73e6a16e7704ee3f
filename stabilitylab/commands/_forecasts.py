"""The common part of ``forecast`` and ``recommend``: from options to candidates, and from forecasts to lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from ..forecast import Candidate, Fitted, Forecast

Stack = Literal["encoder-decoder", "encoder", "decoder"]
Design = Literal["transformer", "gpt2", "llama"]
LAYERS = "Layers in all: 36 is 18 encoder and 18 decoder layers."
DEPTH = typer.Option(help=LAYERS)
LR = typer.Option(help="Peak learning rate.", show_default="by preset")
WARMUP = typer.Option(min=0, help="Updates; 0: none.", show_default="by preset")
D_MODEL = typer.Option("--d-model", help="Width; blocks and heads go with it.", show_default="by preset")
DATA = typer.Option(help="As for 'probe'.", show_default="synthetic")
VALID = typer.Option(help="As for 'probe'.")
STACK = typer.Option(help="As for 'probe'.")
MODEL = typer.Option(help="As for 'probe'.")
PRESET = typer.Option(help="tiny, small or base.", show_default="tiny")
CONFIG = typer.Option(help="TOML file, as for 'probe'.")
SET = typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, as for 'probe'.")


def flags(
    preset: str | None,
    stack: str | None,
    design: str | None,
    data: str | None,
    valid: str | None,
    lr: float | None,
    warmup: int | None,
) -> dict[str, Any]:
    """Return options in the sections of a configuration; an option that was not given is None."""
    return {
        "preset": preset,
        "model": {"stack": stack, "design": design},
        "data": {"source": data, "valid": valid},
        "train": {"lr": lr, "warmup": warmup},
    }


def chosen(archs: str) -> list[str]:
    """Return names of architectures; [] means all."""
    names = [name.strip() for name in archs.split(",") if name.strip()]
    if not names:
        raise UsageError("--arch names no architecture: give all, or names with commas between them.")
    return [] if names == ["all"] else names


def settings(given: Mapping[str, Any], config: Path | None, set_: Sequence[str]) -> dict[str, Any]:
    """Merge file < flags < ``--set``; a flag that was not given is None."""
    from ..config import merge, parse_set, read_config_file

    trimmed = {k: {n: v for n, v in s.items() if v is not None} if isinstance(s, dict) else s for k, s in given.items()}
    flagged = {key: value for key, value in trimmed.items() if value is not None}
    return merge(read_config_file(config) if config else {}, flagged, parse_set(set_))


def of_archs(
    depth: int, d_model: int | None, archs: Sequence[str], given: Mapping[str, Any], quiet: bool
) -> Iterator[Forecast]:
    """Yield one forecast after the other, each as soon as it is measured; the expected cost is printed first."""
    from .. import forecast as room
    from ..data import load_data
    from ..train.environment import prepare_process, resolve_device

    configs, notes = room.wanted(room.Ask(depth, d_model, archs, given))
    first = configs[0]
    prepare_process(first.train.threads)
    device = resolve_device(first.train)
    dataset = load_data(first.data, stack=first.model.stack)
    need = room.estimate(configs, dataset, device)
    candidates = [room.reference(config, dataset, device) for config in configs]
    notes += before(candidates[0], first.train.warmup)
    if not quiet:
        print("\n".join([*notes, need.sentence()]), file=sys.stderr)
    for config, candidate in zip(configs, candidates, strict=True):
        measured = room.measure(candidate, config.train.warmup)
        yield room.forecast(measured, config.train.lr, config.train.warmup, room.fitted(), room.known_edges())


def before(candidate: Candidate, warmup: int) -> list[str]:
    """Return a note if it is known before any measurement that nothing will be forecast; else []."""
    from .. import forecast as room

    fit = room.fitted()
    misses = fit.cover.misses_before(candidate.facts, warmup) if fit else []
    if not misses:
        return []
    return [f"Nothing will be forecast, since {'; '.join(misses)}: what follows is measured, or known from runs."]


def lines(one: Forecast) -> list[str]:
    """Return a forecast as lines for a terminal."""
    from ..forecast.telling import warm_name

    own = one.measured
    layers = f", {own.facts['layers']} layers" if "layers" in own.facts else ""
    head = f"{one.name}{layers}, lr {one.lr:g}, {warm_name(one.warmup)}: {one.word}"
    if one.seen is not None:
        head += ", by runs of this very design"
    elif one.fails is not None:
        head += f", P(fails) {one.fails.value:.2f} [{one.fails.low:.2f}, {one.fails.high:.2f}]"
    elif (tried := own.trials.get(one.warmup)) is not None:
        head += f"; {tried.sentence}"
    found = [head]
    found += [f"  with {name} {edge.sentence()}" for name, edge in one.known.items()]
    found += [f"  on another text ({one.text}) with {name} {edge.sentence()}" for name, edge in one.elsewhere.items()]
    found += [f"  since {reason}" for reason in one.why_not if one.seen is None]
    rates = {name: f"{rate.value:.2g} [{rate.low:.2g}, {rate.high:.2g}]" for name, rate in one.critical.items()}
    rates = {name: rate for name, rate in rates.items() if name not in one.known}
    if len(rates) > 1 and len({*rates.values()}) == 1:  # the fit does not use the warm-up
        rates = {f"{' and with '.join(rates)}, which it does not tell apart": next(iter(rates.values()))}
    found += [f"  critical rate with {name}: {rate}" for name, rate in rates.items()]
    found += [f"  {line}" for line in own.evidence]
    cost = f"{own.update_seconds:.2g} s an update"
    return [*found, f"  took {own.seconds / 60:.1f} minutes ({own.cpu_seconds / 60:.1f} of processor time); {cost}"]


def about(fit: Fitted | None, told: Sequence[Forecast]) -> str:
    """Return the quality of these forecasts in a sentence; "" if there is no forecast among them."""
    if fit is None:
        return "No fit is stored, so that nothing is forecast: what stands above is measured (docs/forecast.md)."
    if all(one.fails is None or one.seen is not None for one in told):
        return ""
    return f"Fit {fit.version}, of {len(fit.archs)} architectures. On architectures left out: {fit.errors}"
