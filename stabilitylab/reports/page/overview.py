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
from ..arrange import distinct
from ..base import Panel, Picture, Reference, Series
from ..collection import Record, Runs
from ..pooling import thin
from ..run_grid import first_metric
from .sentences import heading, sentence

TOLD = 12  # runs that have a sentence; the table has all runs
COMPARED = 3  # up to so many runs, every two are compared beforehand
MOST = 8  # runs that are shown if none are chosen
POINTS = 60  # groups of a curve's points; five points of each are kept
START = "grad_norm"  # the probe that colours the layers first, if it was recorded
CURVES = (
    ("Held-out loss", "cross-entropy [nats/token]", ("held_out_nll",), False),
    ("Training loss", "cross-entropy [nats/token]", ("nll", "loss"), False),
    ("Gradient norm", "L2 norm of all gradients", ("grad_norm_total",), True),
)


@dataclass(frozen=True)
class Told:
    """A run's sentence, its events, the events that came first, remedies for these, and words on an unknown cause."""

    record: Record
    sentence: str
    events: tuple[Event, ...] = ()
    first: tuple[Event, ...] = ()
    remedies: tuple[str, ...] = ()
    unknown: str = ""


@dataclass(frozen=True)
class Overview:
    """The top of the page. ``told``: runs, those that most need a look first; ``pairs``: where two runs part;
    ``settings``: by run, the settings in which runs differ; ``start``: the step at which the page opens, None for the
    last."""

    told: Sequence[Told] = ()
    curves: Picture | None = None
    pairs: Sequence[dict[str, Any]] = ()
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    start: int | None = None
    untold: int = 0  # runs that have no sentence
    order: Sequence[str] = ()  # the names of all runs, those that most need a look first
    labels: dict[str, str] = field(default_factory=dict)  # run -> the title of its architecture
    by_run: bool = False  # each run has its own colour, since several runs have one architecture

    @property
    def last(self) -> int:
        """The last step of any run that has a sentence."""
        steps = [one.record.status.step for one in self.told]
        steps += [event.until or event.step for one in self.told for event in one.events]
        return max([1, *steps])


def overview(runs: Runs, first: Sequence[Record]) -> Overview:
    """Make the top of the page. ``first``: the runs that most need a look, in that order."""
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
        [record.name for record in order],
        {record.name: style.title(record.label) for record in order},
        repeated(runs),
    )


def repeated(runs: Runs) -> bool:
    """Return True if two trained runs have one architecture, so that its colour does not tell them apart."""
    counts = Counter(record.label for record in runs if record.kind != "onestep")
    return max(counts.values(), default=0) > 1


def _told(record: Record) -> Told:
    found = record.diagnosis
    if found is None:
        return Told(record, sentence(record, found))
    return Told(
        record, sentence(record, found), found.events, found.cause.together, tuple(found.remedies), found.unknown
    )


def curves(runs: Runs) -> Picture | None:
    """Draw loss and gradient norm against the step, one line a run. The colours are those of architectures; if several
    runs have one architecture, the page gives a colour to each run that it shows. A value that is not finite is a
    gap."""
    own = repeated(runs)
    lines: list[list[Series]] = [[] for _ in CURVES]
    for record in runs:
        if record.kind == "onestep":
            continue
        for drawn, (_, _, columns, _) in zip(lines, CURVES, strict=True):
            x, y = thin(*first_metric(record, *columns), POINTS)
            if len(x):
                drawn.append(Series(record.name, x.tolist(), y.tolist(), **_look(record, own)))
    panels = []
    for drawn, (title, unit, columns, log) in zip(lines, CURVES, strict=True):
        marks = _baselines(runs) if columns[0] == "held_out_nll" else []
        if drawn:
            panels.append(Panel(title, "step", _unit(runs, unit), drawn, marks, log_y=log))
    return distinct(Picture(panels, "", columns=1)) if panels else None


def _look(record: Record, own: bool) -> dict[str, Any]:
    """Return the look of a run's line; with ``own`` the page replaces its colour by the run's own."""
    return {"dash": "solid", "marker": "none", **({"colour": style.INK} if own else {"arch": record.label})}


def _unit(runs: Runs, unit: str) -> str:
    """Return the name of an axis: the loss of a watched run need not be a cross-entropy."""
    ours = any(record.kind != "watched" for record in runs)
    return unit if ours or "entropy" not in unit else "loss"


def _baselines(runs: Runs) -> list[Reference]:
    """Return the line of the unigram baseline on the held-out batch; [] if runs have several, or none has one."""
    found = (record.run.manifest.get("unigram") or {} for record in runs)
    levels = (float(one.get("cross_entropy", math.nan)) for one in found)
    known = {round(level, 6) for level in levels if math.isfinite(level)}
    return [Reference(known.pop(), "unigram baseline")] if len(known) == 1 else []


def settings(runs: Runs) -> dict[str, dict[str, str]]:
    """Map run to setting to value, of the settings in which the runs differ."""
    own = {record.name: {key: str(value) for key, value in _flat(record).items()} for record in runs}
    keys = dict.fromkeys(key for one in own.values() for key in one)
    free = [key for key in keys if len({one.get(key) for one in own.values()}) > 1]
    return {name: {key: one[key] for key in free if key in one} for name, one in own.items()}


def _flat(record: Record) -> dict[str, Any]:
    return dict(record.settings) if record.settings else dict(flat(record.run.config))


def _pairs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Compare every two of these runs: the first difference of two, and its growth."""
    found = []
    for a, b in itertools.combinations([record for record in records if record.kind != "onestep"], 2):
        one = a.remember(("parted", a.name, b.name), lambda a=a, b=b: _parted(a, b), keep=True, other=b)
        if one is not None:
            found.append(one)
    return found


def _parted(a: Record, b: Record) -> dict[str, Any] | None:
    """Return where two runs part; None if they have no step in common."""
    try:
        one = compare(a.run, b.run)
    except DamagedError:
        raise
    except InputError:
        return None
    growth = [
        {"above": level, "step": each.step, "probe": each.probe, "where": each.where}
        for level, each in one.growth.items()
        if each is not None
    ]
    told = one.paragraph.replace(str(a.run.path), a.name).replace(str(b.run.path), b.name)
    return {"a": a.name, "b": b.name, "paragraph": told, "growth": growth}


def facts(view: Overview, anchors: dict[str, str]) -> dict[str, Any]:
    """Return the data of the page's scripts. ``anchors``: run -> the figure that holds its maps."""
    shown = [one.record for one in view.told if one.record.name in anchors]
    alike = Counter(map(heading, shown))
    # if all runs have one architecture and depth, only the names tell them apart
    names = [one.name if len(alike) == 1 else f"{heading(one)} ({one.name})" for one in shown]
    titles = [name if alike[heading(one)] > 1 else heading(one) for one, name in zip(shown, names, strict=True)]
    return {
        "runs": [
            {"name": one.name, "title": title, "figure": anchors[one.name]}
            for one, title in zip(shown, titles, strict=True)
        ],
        "order": list(view.order),
        "byRun": view.by_run,
        "most": MOST,
        "events": {one.record.name: _marks(one.events) for one in view.told if one.events},
        "labels": view.labels,
        "start": {"probe": START, "step": view.start, **_side_by_side(view)},
        "settings": view.settings,
        "pairs": list(view.pairs),
    }


def _marks(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the marks of events on the curves, the worst last, so that it is drawn above the others."""
    rank = {severity: place for place, severity in enumerate(("note", "warning", "failure"))}
    ordered = sorted(events, key=lambda event: rank.get(event.severity, 0))
    return [
        {"step": one.step, "severity": one.severity, "title": one.title, "evidence": one.evidence} for one in ordered
    ]


def _side_by_side(view: Overview) -> dict[str, str]:
    """Return the two runs that the page opens side by side: those of a report of exactly two runs."""
    names = [one.record.name for one in view.told]
    return {"a": names[0], "b": names[1]} if len(names) == 2 and not view.untold else {}


def track(event: Event, last: int) -> dict[str, Any]:
    """An event as a mark on a time line of ``last`` steps, in per cent of its width."""
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
        "consequence": event.consequence,
        "remedy": event.remedy,
        "probe": table,
        "layer": place.layer if place and place.layer > 0 else None,
        "stack": place.stack if place else "",
    }
