"""The top of the page: a sentence, the events and the curves of each run, and what the page needs to compare two."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...diagnose import Event, compare
from ...errors import DamagedError, InputError
from ...store.layout import flat
from .. import style
from ..base import Panel, Picture, Reference, Series
from ..collection import Record, Runs
from ..pooling import thin
from .sentences import heading, sentence

TOLD = 12  # runs that have a sentence; the table has all
COMPARED = 3  # of at most so many runs each two are compared beforehand
POINTS = 60  # groups of a curve's points; five are kept of each
START = "grad_norm"  # the probe that colours the layers first, where it was recorded
CURVES = (
    ("Held-out loss", "cross-entropy [nats/token]", ("held_out_nll",), False),
    ("Training loss", "cross-entropy [nats/token]", ("nll", "loss"), False),
    ("Gradient norm", "L2 norm of all gradients", ("grad_norm_total",), True),
)


@dataclass(frozen=True)
class Told:
    """One run: its sentence, and what happened in it."""

    record: Record
    sentence: str
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Overview:
    """``told``: those that most need a look first; ``pairs``: where two of them part; ``settings``: by run, those in
    which runs differ; ``start``: the step at which the page opens, None for the last."""

    told: Sequence[Told] = ()
    curves: Picture | None = None
    pairs: Sequence[dict[str, Any]] = ()
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    start: int | None = None
    untold: int = 0  # runs that have no sentence

    @property
    def last(self) -> int:
        """The last step of any run that is told of."""
        steps = [one.record.status.step for one in self.told]
        steps += [event.until or event.step for one in self.told for event in one.events]
        return max([1, *steps])


def overview(runs: Runs, first: Sequence[Record]) -> Overview:
    """``first``: the runs that most need a look, in that order."""
    order = [*first, *(record for record in runs if not any(record is one for one in first))]
    told = [_told(record) for record in order[:TOLD]]
    events = [event for one in told[:1] for event in one.events if event.severity != "note"]
    going = any(record.status.state == "running" for record in runs)
    start = None if going or not events else events[0].step
    return Overview(
        told,
        curves(runs),
        _pairs(order if len(order) <= COMPARED else []),
        settings(runs),
        start,
        len(order) - len(told),
    )


def _told(record: Record) -> Told:
    found = record.diagnosis
    return Told(record, sentence(record, found), found.events if found else ())


def curves(runs: Runs) -> Picture | None:
    """Loss and gradient norm against the update, one line a run, in the colours of architectures."""
    dashes: dict[str, itertools.count[int]] = {}
    looks = {}
    for record in runs:
        place = next(dashes.setdefault(record.label, itertools.count()))
        looks[record.name] = {"arch": record.label, "dash": style.DASHES[place % len(style.DASHES)], "marker": "none"}
    repeated = max(Counter(record.label for record in runs).values(), default=0)
    if 1 < repeated <= len(style.DASHES):  # a dash is one run's
        looks = {name: {**look, "detail": name} for name, look in looks.items()}
    panels = []
    for title, unit, columns, log in CURVES:
        lines = []
        for record in runs:
            column = next((name for name in columns if name in record.metrics), "")
            if record.kind == "onestep" or not column:
                continue
            known = record.metrics[["step", column]].dropna()
            x, y = thin(known["step"].to_numpy(), known[column].to_numpy(float), POINTS)
            if len(x):
                lines.append(Series(record.name, x.tolist(), y.tolist(), **looks[record.name]))
        marks = _baselines(runs) if columns[0] == "held_out_nll" else []
        if lines:
            panels.append(Panel(title, "update", unit, lines, marks, log_y=log))
    return Picture(panels, "", columns=3) if panels else None


def _baselines(runs: Runs) -> list[Reference]:
    known = {round(level, 6) for record in runs if math.isfinite(level := record.baseline)}
    return [Reference(known.pop(), "unigram baseline")] if len(known) == 1 else []


def settings(runs: Runs) -> dict[str, dict[str, str]]:
    """Run -> setting -> value, of the settings in which not all are alike."""
    own = {record.name: {key: str(value) for key, value in _flat(record).items()} for record in runs}
    keys = dict.fromkeys(key for one in own.values() for key in one)
    free = [key for key in keys if len({one.get(key) for one in own.values()}) > 1]
    return {name: {key: one[key] for key in free if key in one} for name, one in own.items()}


def _flat(record: Record) -> dict[str, Any]:
    return dict(record.settings) if record.settings else dict(flat(record.run.config))


def _pairs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Compare every two of these runs: their first difference, and its growth."""
    found = []
    for a, b in itertools.combinations([record for record in records if record.kind != "onestep"], 2):
        try:
            one = compare(a.run, b.run)
        except DamagedError:
            raise
        except InputError:  # no step in common
            continue
        growth = [
            {"above": level, "step": each.step, "probe": each.probe, "where": each.where}
            for level, each in one.growth.items()
            if each is not None
        ]
        told = one.paragraph.replace(str(a.run.path), a.name).replace(str(b.run.path), b.name)
        found.append({"a": a.name, "b": b.name, "paragraph": told, "growth": growth})
    return found


def facts(view: Overview, anchors: dict[str, str]) -> dict[str, Any]:
    """Return the data of the page's scripts. ``anchors``: run -> the figure that holds its maps."""
    shown = [one.record for one in view.told if one.record.name in anchors]
    alike = Counter(map(heading, shown))
    titles = [heading(one) + f" ({one.name})" * (alike[heading(one)] > 1) for one in shown]
    return {
        "runs": [
            {"name": one.name, "title": title, "figure": anchors[one.name]}
            for one, title in zip(shown, titles, strict=True)
        ],
        "start": {"probe": START, "step": view.start, **_side_by_side(view)},
        "settings": view.settings,
        "pairs": list(view.pairs),
    }


def _side_by_side(view: Overview) -> dict[str, str]:
    """Two runs stand side by side from the start where there are no others."""
    names = [one.record.name for one in view.told]
    return {"a": names[0], "b": names[1]} if len(names) == 2 and not view.untold else {}


def track(event: Event, last: int) -> dict[str, Any]:
    """An event as a mark on a time line of ``last`` updates, in per cent of its width."""
    until = event.step if event.until is None else event.until
    left, width = 100 * event.step / last, 100 * max(0, until - event.step) / last
    table = event.probe.partition(".")[0]
    place = event.place
    return {
        "left": round(float(np.clip(left, 0, 100)), 2),
        "width": round(float(min(width, 100 - min(left, 100))), 2),
        "step": event.step,
        "until": event.until,
        "title": event.title,
        "where": event.where,
        "severity": event.severity,
        "evidence": event.evidence,
        "probe": table,
        "layer": place.layer if place and place.layer > 0 else None,
        "stack": place.stack if place else "",
    }
