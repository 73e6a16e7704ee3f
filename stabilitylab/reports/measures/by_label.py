"""Lines of which most figures are made: one for each label, over the seeds of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .. import style
from ..base import Series, Spread
from ..collection import Record, Runs


def by_label(
    group: Runs, points: Callable[[Record], Mapping[float, float]], *, log: bool = False,
    dash: Callable[[str], str] = lambda label: "",
) -> list[Series]:  # fmt: skip
    """Draw a line for each label: the mean over its seeds of ``points`` of a run, place -> value. ``log``: take the
    geometric mean; ``dash``: return the dash of a label, "" for the architecture's."""
    lines = []
    for label in group.labels:
        spread = Spread(log=log)
        for record in group.where(label=label):
            found = points(record)
            spread.add([*found], [*found.values()])
        if spread.points:
            lines.append(spread.series(style.title(label), arch=label, dash=dash(label)))
    return lines
