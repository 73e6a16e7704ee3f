"""``forecast``: whether a model trains at a depth, rate and warm-up, and its highest stable rate."""

from __future__ import annotations

import json
import math
import sys
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from . import command
from ._factory import GIVES
from ._forecasts import CONFIG, D_MODEL, DATA, LAYERS, LR, MODEL, PRESET, SET, STACK, VALID, WARMUP, Design, Stack
from ._options import JSON, QUIET, VERBOSE

if TYPE_CHECKING:
    from ..forecast import Forecast

USUAL_WARMUP = 40  # the warm-up of the fit, for a user's model that names none


def worth() -> str:
    """Return the errors of the stored fit in a sentence, for ``--help``; the modules that compute are not imported."""
    path = Path(__file__).parents[1] / "forecast" / "fitted.json"
    if not path.exists():
        return (
            "Nothing is fitted yet, so that it measures and says 'cannot tell'; docs/forecast.md has how far that is."
        )
    fit = json.loads(path.read_text(encoding="utf-8"))
    low, high = fit["cover"]["between"]["layers"]
    return (
        f"Fitted to small encoder-decoders, {fit['cover']['same']['width']} wide, of {low:g} to {high:g} layers on one "
        "text; what is not like these gets what was measured, and 'cannot tell'. On architectures left out: "
        f"{fit['errors']} docs/forecast.md has the tables."
    )


def forecast(
    factory: Annotated[
        str | None,
        typer.Argument(
            metavar="PACKAGE.MODULE:FACTORY",
            help=f"For a model of your own: a function that returns {GIVES.format(takes='forecast')}.",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="all, or names with commas between them.", show_default="branchnorm")
    ] = None,
    depth: Annotated[int | None, typer.Option(help=LAYERS, show_default="36")] = None,
    lr: Annotated[float | None, LR] = None,
    warmup: Annotated[int | None, WARMUP] = None,
    d_model: Annotated[int | None, D_MODEL] = None,
    data: Annotated[str | None, DATA] = None,
    valid: Annotated[str | None, VALID] = None,
    stack: Annotated[Stack | None, STACK] = None,
    model: Annotated[Design | None, MODEL] = None,
    preset: Annotated[str | None, PRESET] = None,
    config: Annotated[Path | None, CONFIG] = None,
    set_: Annotated[list[str] | None, SET] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    verbose: Annotated[bool, VERBOSE] = False,
) -> None:
    from .. import forecast as room
    from ..store.layout import plain
    from ._forecasts import about, chosen, flags, lines, of_archs, settings

    fit = room.fitted()
    if factory is None:
        given = settings(flags(preset, stack, model, data, valid, lr, warmup), config, set_ or ())
        each = of_archs(36 if depth is None else depth, d_model, chosen(arch or "branchnorm"), given, quiet)
    else:
        reference = {"--arch": arch, "--depth": depth, "--d-model": d_model, "--data": data, "--valid": valid}
        reference |= {"--stack": stack, "--model": model, "--preset": preset, "--config": config, "--set": set_}
        if foreign := [name for name, value in reference.items() if value]:
            raise UsageError(f"{foreign[0]} is about reference models: leave it out, or leave out {factory}.")
        if lr is None:
            raise UsageError("give --lr: the peak learning rate at which your model is to train.")
        if not 0 < lr < math.inf:
            raise UsageError(f"--lr {lr:g} is no learning rate: give a positive number.")
        each = iter([_yours(factory, lr, USUAL_WARMUP if warmup is None else warmup, quiet)])
    found, told = [], []
    for one in each:
        found.append(one.as_dict())
        told.append(one)
        if not as_json:
            print("\n".join([*lines(one), ""]), flush=True)
    if as_json:
        stored = None if fit is None else {key: value for key, value in vars(fit).items() if key != "line"}
        stored = stored and {**stored, "cover": vars(stored["cover"])}
        print(json.dumps(plain({"forecasts": found, "fit": stored}), indent=2))
    elif not quiet and (words := about(fit, told)):
        print(words)


def _yours(factory: str, lr: float, warmup: int, quiet: bool) -> Forecast:
    from .. import forecast as room
    from ..check import preflight
    from ..forecast.candidate import KEYS
    from ..train.environment import prepare_process
    from ._factory import made_by
    from ._forecasts import before

    prepare_process(1)
    candidate = room.of_yours(factory, made_by(factory, "forecast", "forecast", KEYS, signature(preflight).parameters))
    if not quiet and (notes := before(candidate, warmup)):
        print("\n".join(notes), file=sys.stderr)
    return room.forecast(room.measure(candidate, warmup), lr, warmup, room.fitted())


forecast.__doc__ = f"""Forecast whether models train at a depth, learning rate and warm-up, and where the edge is.

{worth()}
"""
command("forecast", rank=25)(forecast)
