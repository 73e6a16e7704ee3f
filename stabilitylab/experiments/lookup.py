"""The runs of a figure by its name: which there are, where they stand, what they cost, and the command for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from ..errors import UsageError
from .one_gpu import ONE_GPU
from .recipe import FIGURES, Experiment, Recipe, Scale, Settings, slug

# Figures that are drawn from the same runs share a folder, so that none of them runs twice.
_FOLDERS = {
    "branchnorm:1": "branchnorm:8",
    "branchnorm:4": "branchnorm:8",
    "branchnorm:7": "branchnorm:T",
    "branchnorm:9": "branchnorm:8",
    "deepnet:5": "claims:fast",
    "deepnet:6": "table",
    "table:stability": "table",
    "admin:4": "claims:fast",
    "admin:5": "branchnorm:8",
    "admin:7": "admin:6",
}
# Where a figure has runs of its own at one scale, and nothing in common with those it is drawn from at others.
_ALONE = {
    *(("branchnorm:1", "paper"), ("branchnorm:7", "tiny"), ("admin:5", "tiny")),
    *(("deepnet:5", "h200"), ("deepnet:6", "paper")),
}
# Figures whose runs may have any length: their ramps and warm-ups are shares of it.
_ANY_LENGTH = {
    *((f"branchnorm:{name}", "tiny") for name in ("1", "3", "4", "7", "8", "9", "T")),
    *(("branchnorm:8", "h200"), ("branchnorm:9", "h200")),
}
# Core-minutes at scale tiny on synthetic data: CPU time of one process of each kind, its 3.4 s of start included (torch
# 2.13, one thread of a shared two-core machine; 50 to 300 updates, scaled to the full number), times the runs. Those of
# Protocol 2 (branchnorm:*) are 2.7 ms a layer and update, a tenth more with probes.
_MINUTES = {
    "branchnorm:1": 172,
    "branchnorm:3": 16,
    "branchnorm:4": 367,
    "branchnorm:5": 21,
    "branchnorm:6": 63,
    "branchnorm:7": 33,
    "branchnorm:8": 367,
    "branchnorm:9": 367,
    "branchnorm:T": 130,
    "deepnet:3": 20,
    "deepnet:4": 17,
    "deepnet:5": 29,
    "deepnet:6": 97,
    "deepnet:7": 19,
    "deepnet:8": 14,
    "table:stability": 97,
    "admin:4": 26,
    "admin:5": 12,
    "admin:6": 5,
    "admin:7": 10,
    "admin:grid": 16,
    "claims:fast": 26,
}


def experiments(
    figure: str,
    scale: str = "tiny",
    *,
    data: Settings | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
) -> list[Experiment]:
    """The runs of ``figure`` ("branchnorm:8", or "8" for short) at ``scale``; ``data`` sets data.* for all of them.

    ``seeds`` replaces the figure's own, ``steps`` the number of updates where that is free: in the comparisons by
    Protocol 2 (branchnorm:1, 3, 4, 7, 8, 9 and T) at scale ``tiny``, and in Figures 8 and 9 at scale ``h200``. Raises
    UsageError for an unknown figure or scale, for one that has no runs at that scale, at scale ``paper`` without
    ``data["source"]``, and for ``steps`` elsewhere.
    """
    name = FIGURES.resolve(figure)
    recipe = asked(name, scale, {"data": dict(data or {})}, seeds, steps)
    return list((ONE_GPU if scale == "h200" else FIGURES)[name](recipe))


def asked(
    figure: str, scale: str, settings: Settings, seeds: Sequence[int] | None = None, steps: int | None = None
) -> Recipe:
    """What a figure's function is asked for; raises UsageError where the figure cannot be had like that."""
    name = FIGURES.resolve(figure)
    if scale not in get_args(Scale):
        raise UsageError(f"unknown scale {scale!r}; choose one of {', '.join(get_args(Scale))}.")
    if scale == "paper" and not settings.get("data", {}).get("source"):
        raise UsageError(
            f"{name} at scale paper needs text of yours: name it with --data text:SRC,TGT or --data hf:DATASET,SRC,TGT."
        )
    if scale == "h200" and name not in ONE_GPU:
        raise UsageError(f"{name} has no runs at scale h200; there are {', '.join(ONE_GPU)}.")
    if steps is not None and (name, scale) not in _ANY_LENGTH:
        raise UsageError(f"the length of the runs of {name} at scale {scale} is fixed, so that they can be compared.")
    if steps is not None and steps < 1:
        raise UsageError(f"{steps} updates: give at least one.")
    return Recipe(cast(Scale, scale), settings, seeds, steps)


def on_device(runs: Sequence[Experiment], device: str | None) -> list[Experiment]:
    """The same runs on ``device``; None: as they are. Where a run is computed is no part of what it is."""
    if device is None:
        return list(runs)
    moved = [(run, run.config.train.model_copy(update={"device": device})) for run in runs]
    return [replace(run, config=run.config.model_copy(update={"train": train})) for run, train in moved]


def folder(figure: str, scale: str = "tiny") -> str:
    """Where the runs of ``figure`` stand below the folder of all runs: ``tiny/branchnorm-8`` for ``branchnorm:9``."""
    name = FIGURES.resolve(figure)
    return f"{scale}/{slug(name if (name, scale) in _ALONE else _FOLDERS.get(name, name))}"


def minutes(figure: str, scale: str = "tiny") -> float | None:
    """Core-minutes that all runs of ``figure`` take on synthetic data; None at other scales, where nobody measured."""
    return _MINUTES[FIGURES.resolve(figure)] if scale == "tiny" else None


def command(figure: str, scale: str = "tiny") -> str:
    """The shell command that makes the runs of ``figure``; one-step runs share a few processes in ``claims --fast``."""
    name = FIGURES.resolve(figure)
    if scale == "tiny" and name in ("claims:fast", "admin:4"):
        return "stabilitylab claims --fast"
    if scale == "tiny" and folder(name) == folder("table:stability"):
        return "stabilitylab sweep table"
    return f"stabilitylab sweep {name} --scale {scale}" + ("" if scale == "tiny" else " --data text:SRC,TGT")
