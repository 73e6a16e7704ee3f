"""The runs of a figure, by its name: their list, folder, cost, and the command that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from ..errors import UsageError
from .recipe import Experiment, Recipe, Scale, Settings, slug
from .sweeps import SWEEPS


def experiments(
    figure: str,
    scale: str = "tiny",
    *,
    data: Settings | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
) -> list[Experiment]:
    """Return the runs of ``figure`` ("branchnorm:8", or "8" for short) at ``scale``; ``data`` sets data.* for all of
    them.

    ``seeds`` replaces the figure's own, ``steps`` the number of updates where the figure's sweep leaves that free.
    Raises UsageError for an unknown figure or scale, for one that has no runs at that scale, at scale ``paper`` without
    ``data["source"]``, and for ``steps`` elsewhere.
    """
    return list(SWEEPS[figure](asked(figure, scale, {"data": dict(data or {})}, seeds, steps)))


def asked(
    figure: str, scale: str, settings: Settings, seeds: Sequence[int] | None = None, steps: int | None = None
) -> Recipe:
    """Check the recipe of a figure; raises UsageError if the figure cannot be made like that."""
    name = SWEEPS.resolve(figure)
    if scale not in get_args(Scale):
        raise UsageError(f"unknown scale {scale!r}; choose one of {', '.join(get_args(Scale))}.")
    if scale not in SWEEPS[name].scales:
        others = ", ".join(other for other in SWEEPS if scale in SWEEPS[other].scales)
        raise UsageError(f"{name} has no runs at scale {scale}; there are {others}.")
    if scale == "paper" and not settings.get("data", {}).get("source"):
        raise UsageError(
            f"{name} at scale paper needs text of yours: name it with --data text:SRC,TGT or --data hf:DATASET,SRC,TGT."
        )
    if steps is not None and scale not in SWEEPS[name].any_length:
        raise UsageError(f"the length of the runs of {name} at scale {scale} is fixed, so that they can be compared.")
    if steps is not None and steps < 1:
        raise UsageError(f"{steps} updates: give at least one.")
    return Recipe(cast(Scale, scale), settings, seeds, steps)


def on_device(runs: Sequence[Experiment], device: str | None) -> list[Experiment]:
    """Return the same runs on ``device`` (None: unchanged). The device is not part of the identity of a run."""
    if device is None:
        return list(runs)
    return [replace(run, config=run.config.changed(train={"device": device})) for run in runs]


def folder(figure: str, scale: str = "tiny") -> str:
    """Return the folder of the runs of ``figure``, below the folder of all runs: ``tiny/branchnorm-8`` for
    ``branchnorm:9``."""
    entry = SWEEPS[figure]
    return f"{scale}/{slug(entry.folders.get(cast(Scale, scale), entry.name))}"


def minutes(figure: str, scale: str = "tiny") -> float | None:
    """Return the core-minutes of all runs of ``figure`` on synthetic data at scale tiny; None if not measured, and for
    the other scales."""
    return SWEEPS[figure].minutes if scale == "tiny" else None


def command(figure: str, scale: str | None = None) -> str:
    """Return the shell command that makes the runs of ``figure``, by default at the first of its scales."""
    entry = SWEEPS[figure]
    scale = scale or entry.scales[0]
    if scale == "tiny" and entry.command:
        return entry.command
    return f"stabilitylab sweep {entry.name} --scale {scale}" + ("" if scale == "tiny" else " --data text:SRC,TGT")
