"""A signal: scale-free numbers of a row, each at the place where it is largest; and the registry of all signals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np

from ..errors import UsageError
from ..registry import Registry, Room
from ..schema import Row

Kind = Literal["z", "drift", "all", "level", "rise", "stall"]
Places = Sequence[Row | None]  # None: the whole model, of a metric
Scale = Callable[[np.ndarray], np.ndarray]
Take = Callable[[np.ndarray, Places], tuple[np.ndarray, Places]]

COMPARED: tuple[Kind, ...] = ("z", "drift", "all")
OVER_LOWEST: tuple[Kind, ...] = ("rise", "stall")


def log(values: np.ndarray) -> np.ndarray:
    """Return ln; NaN if a number is not positive."""
    return np.log(values, out=np.full(values.shape, np.nan), where=values > 0)


@dataclass(frozen=True)
class Signal:
    """A signal of the alarm.

    - ``name``: what it is registered as. Its readings are BASE.KIND, where BASE is the name up to a point, if it has
      one: two signals may share a base if they have no kind in common.
    - ``table`` and ``column``: where its numbers stand; without a table ``column`` is a metric.
    - ``take``: a function that gets the numbers, (places,), and their places. It returns the numbers that count, with
      their places.
    - ``kinds``: "z" (the largest deviation from the past of a place), "drift" (the largest mean of the last rows minus
      the mean of that past), "all" (the mean drift over places), "rise" (the largest mean of the last rows minus the
      lowest such mean so far), "stall" (the largest share of the rows since that lowest mean), "level" (the largest
      number itself, if it is decisive).
    - ``scale``: a function that makes differences scale-free, before all kinds but level.
    - ``smallest``: True if the smallest level counts, and not the largest.
    - ``title``: the quantity in words, the docstring of ``take``.
    """

    name: str
    table: str
    column: str
    take: Take
    kinds: tuple[Kind, ...]
    scale: Scale
    smallest: bool
    rank: int
    title: str

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def readings(self) -> tuple[str, ...]:
        """Return the names of what it reads: ``("loss.z", "loss.drift")``."""
        return tuple(f"{self.base}.{kind}" for kind in self.kinds)

    @property
    def is_compared(self) -> bool:
        """True if its places have a past."""
        return bool({*self.kinds} & {*COMPARED})

    @property
    def is_over_lowest(self) -> bool:
        """True if its places have a lowest mean."""
        return bool({*self.kinds} & {*OVER_LOWEST})


SIGNALS: Registry[Signal] = Registry("signal", Room("stabilitylab.alarm.library", "stabilitylab.signals"))


def signal(
    name: str,
    *,
    column: str,
    table: str = "",
    kinds: Sequence[Kind] = COMPARED,
    scale: Scale = log,
    smallest: bool = False,
    rank: int = 1000,
) -> Callable[[Take], Take]:
    """Register the decorated function as a signal; the arguments are those of :class:`Signal`.

    The function takes the numbers of a row, (places,), and their places, and returns those that count. Its docstring
    is the quantity in words, as alerts say it: "the training loss". ``rank``: its place in lists. Raises UsageError for
    a kind that is none, or a function without a docstring.
    """
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise UsageError(f"signal {name!r}: kind {unknown[0]!r} is none of {', '.join(get_args(Kind))}.")

    def decorate(take: Take) -> Take:
        title = (inspect.getdoc(take) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")
        if not title:
            raise UsageError(f"signal {name!r}: its function needs a docstring, the quantity in words.")
        entry = Signal(name, table, column, take, tuple(kinds), scale, smallest, rank, title)
        SIGNALS.register(name, module=take.__module__)(entry)
        return take

    return decorate


def signals() -> tuple[Signal, ...]:
    """Return all signals, in the order of lists."""
    return tuple(sorted(SIGNALS.values(), key=lambda each: (each.rank, each.name)))


def names() -> tuple[str, ...]:
    """Return the names of all readings, in their order."""
    return tuple(name for each in signals() for name in each.readings)


@cache
def signal_of(reading: str) -> Signal:
    """Return the signal of a reading: that of ``"loss.z"``. Raises UsageError for an unknown one."""
    found = next((each for each in signals() if reading in each.readings), None)
    if found is None:
        raise UsageError(f"no signal {reading!r}; there are {', '.join(names())}.")
    return found


def tables_read() -> frozenset[str]:
    """Return the tables that signals read."""
    return frozenset(each.table for each in signals()) - {""}
