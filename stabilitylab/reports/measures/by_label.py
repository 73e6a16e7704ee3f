"""Draws a line a label: numbers of each of its runs, over seeds. What most figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .. import style
from ..base import Series, Spread
from ..collection import Record, Runs


def by_label(
    group: Runs, points: Callable[[Record], Mapping[float, float]], *, log: bool = False,
    dash: Callable[[str], str] = lambda label: "",
) -> list[Series]:  # fmt: skip
    """Draws, for each label that has any, the mean over seeds of ``points`` of its runs, place -> value; ``log``: the
    geometric mean; ``dash`` of a label, where it is not the architecture's."""
    lines = []
    for label in group.labels:
        spread = Spread(log=log)
        for record in group.where(label=label):
            found = points(record)
            spread.add([*found], [*found.values()])
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label, dash=dash(label)))
    return lines
