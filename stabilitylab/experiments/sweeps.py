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

    ``minutes``: core-minutes of all of them at scale tiny on synthetic data, None where nobody measured them.
    ``folders``: scale -> the name under which they stand where that is not the figure's own, since figures that are
    drawn from the same runs share a folder, so that none of them runs twice. ``any_length``: the scales at which the
    runs may have any length, as ramps and warm-ups are shares of it. ``command``: what makes those at scale tiny, where
    that is not ``stabilitylab sweep``.
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
    """A registry by the name of a figure, ``8`` for ``branchnorm:8``, ``table`` for its only one."""

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
    """Registers a function as the runs of the figure ``name``, and leaves it as it is; see :class:`Sweep`.

    ``folder``: another figure's name, at all scales or by scale.
    """
    folders = dict.fromkeys(scales, folder) if isinstance(folder, str) and folder else dict(folder or {})

    def decorate(runs: RunsOf) -> RunsOf:
        entry = Sweep(name, runs, scales, minutes, folders, any_length, command)
        SWEEPS.register(name, module=getattr(runs, "__module__", ""))(entry)
        return runs

    return decorate
