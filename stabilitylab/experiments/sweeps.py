"""Sweeps: the runs that a figure needs. Each is defined in the file of its figure, with its cost and its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..registry import Registry, Room
from .recipe import Experiment, Recipe, Scale

ROOM = Room("stabilitylab.reports.figures", "stabilitylab.figures")  # of figures, of their claims, and of their runs
RunsOf = Callable[[Recipe], Iterator[Experiment]]
T = TypeVar("T")


@dataclass(frozen=True)
class Sweep:
    """The runs that a figure needs: call it with a recipe.

    ``minutes``: core-minutes of all runs at scale tiny on synthetic data; None if not measured. ``folders``: scale ->
    the figure whose folder has the runs, if that is another figure: figures that are drawn from the same runs share a
    folder, so that no run is made twice. ``any_length``: the scales at which the runs may have any length, since their
    ramps and warm-ups are shares of the length. ``command``: the command that makes the runs at scale tiny, if that is
    not ``stabilitylab sweep``.
    """

    name: str
    runs: RunsOf
    scales: tuple[Scale, ...] = ("tiny", "paper")
    minutes: float | None = None
    folders: Mapping[Scale, str] = field(default_factory=dict)
    any_length: tuple[Scale, ...] = ()
    command: str = ""

    def __call__(self, ask: Recipe) -> Iterator[Experiment]:
        return self.runs(ask)


class ByFigure(Registry[T]):
    """A registry by the name of a figure. ``8`` stands for ``branchnorm:8``, and ``table`` for ``table:stability``."""

    def resolve(self, name: str) -> str:
        short = {"table": "table:stability"}
        return super().resolve(f"branchnorm:{name}" if name.isdigit() else short.get(name, name))


SWEEPS: ByFigure[Sweep] = ByFigure("figure with a sweep", ROOM)


def sweep(
    name: str,
    *,
    scales: tuple[Scale, ...] = ("tiny", "paper"),
    minutes: float | None = None,
    folder: str | Mapping[Scale, str] = "",
    any_length: tuple[Scale, ...] = (),
    command: str = "",
) -> Callable[[RunsOf], RunsOf]:
    """Register a function as the runs of the figure ``name``, and return the function unchanged; see :class:`Sweep`.

    ``folder``: another figure's name, at all scales or by scale.
    """
    folders = dict.fromkeys(scales, folder) if isinstance(folder, str) and folder else dict(folder or {})

    def decorate(runs: RunsOf) -> RunsOf:
        entry = Sweep(name, runs, scales, minutes, folders, any_length, command)
        SWEEPS.register(name, module=getattr(runs, "__module__", ""))(entry)
        return runs

    return decorate
