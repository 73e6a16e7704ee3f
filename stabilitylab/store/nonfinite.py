"""The first step from which the loss is not finite, for ``runs`` and the page, in runs without a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrays import numbers
from .layout import METRICS

if TYPE_CHECKING:
    from .reader import Run

LOSSES = ("loss", "nll")


def lost(run: Run) -> str:
    """Say in one sentence which number was not finite, and since when.

    The sentence is the first one of the incident. Without an incident it names the last recorded loss and the step
    since which it is not finite. "" if the loss is finite, or if there is none.
    """
    if (incident := run.incident) is not None:
        told = str(incident.get("paragraph") or f"Step {incident['step']}: a number is not finite.")
        return told.partition(". ")[0].rstrip(".")
    data = run.arrow(METRICS)
    for name in LOSSES:
        if name not in data.column_names or not len(column := data[name].drop_null()):
            continue
        values = numbers(column).astype(float)
        if np.isfinite(values[-1]):
            return ""
        steps = numbers(data["step"].filter(data[name].is_valid()))
        sound = np.flatnonzero(np.isfinite(values))
        since = int(steps[sound[-1] + 1 if len(sound) else 0])
        return f"Step {since}: the loss is {values[-1]} from here to the end of the record"
    return ""
