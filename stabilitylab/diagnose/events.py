"""An event: something that happened in a run, when and where, with its evidence; and the registry of detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from ..registry import Registry, Room
from ..schema import Row
from .evidence import LOSSES, Evidence, Grid
from .order import describe, rank

Severity = Literal["note", "warning", "failure"]
Role = Literal["setting", "mechanism", "outcome"]
F = TypeVar("F", bound="Callable[[Evidence], Iterable[Event]]")


@dataclass(frozen=True)
class Event:
    """``kind`` happened at ``step`` (first seen there; ``after``: the last row in which it was not) and lasted
    ``until`` (None: to the end, or not said). ``strength``: how many times over its threshold; None where that means
    nothing, as of a NaN. ``severity``: a note leaves a run healthy, a failure means that it did not learn or broke.
    ``open``: what cannot be told yet of a note that stands at the end, such as whether it passes; then the run is not
    called healthy either."""

    kind: str
    title: str
    step: int
    phase: str
    evidence: str
    severity: Severity = "warning"
    after: int | None = None
    until: int | None = None
    place: Row | None = None
    places: int = 1
    probe: str = ""
    strength: float | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    open: str = ""

    @property
    def role(self) -> Role:
        """``setting``: from outside of the network's dynamics; ``outcome``: what a run ends in, never the cause where
        anything else was seen."""
        return DETECTORS[self.kind].role if self.kind in DETECTORS else "mechanism"

    @property
    def moment(self) -> tuple[int, int]:
        """Step and rank of the phase: later moments of a row depend on earlier ones."""
        return self.step, rank(self.phase)

    @property
    def resolved(self) -> bool:
        """Whether the step before was recorded too, so that the event began at this very step."""
        return self.after is not None and self.after == self.step - 1

    @property
    def where(self) -> str:
        more = f" and {self.places - 1} more" if self.places > 1 else ""
        return describe(self.place) + more

    def as_dict(self) -> dict[str, Any]:
        place = self.place
        return {
            "kind": self.kind,
            "step": self.step,
            "until": self.until,
            "not_seen_at": self.after,
            "phase": self.phase,
            "stack": place.stack if place else "",
            "layer": place.layer if place else 0,
            "sublayer": place.sublayer if place else "",
            "site": place.site if place else "",
            "places": self.places,
            "probe": self.probe,
            "severity": self.severity,
            "strength": self.strength,
            "evidence": self.evidence,
            "open": self.open,
            "numbers": dict(self.numbers),
        }


def alike(events: Sequence[Event]) -> list[list[Event]]:
    """The same finding once: events of one kind, stack and severity together, as two tables often see one thing."""
    found: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        found.setdefault((event.kind, event.place.stack if event.place else "", event.severity), []).append(event)
    return list(found.values())


@dataclass(frozen=True)
class Detector:
    """Looks for one kind of event. ``reads``: each source (table, one of its columns, or metric) that it can do with ->
    how to record it. ``least_rows``: with fewer it cannot tell. ``explains``: kinds of events that this one
    makes by arithmetic, not by dynamics. ``mild``: in a run whose loss was judged and learns, such an event is a
    note."""

    kind: str
    title: str
    reads: Mapping[str, str]
    find: Callable[[Evidence], Iterable[Event]]
    role: Role = "mechanism"
    least_rows: int = 0
    explains: tuple[str, ...] = ()
    mild: bool = False

    def sources(self, evidence: Evidence) -> list[str]:
        """Which of its sources hold a number in this run."""

        def holds(name: str) -> bool:
            grid, metric = _read(evidence, name)
            if "." in name:  # a column that may be there without a number in it
                return grid is not None and bool((~grid.absent & ~np.isnan(grid.values)).any())
            return any(one is not None and not one.absent.all() for one in (grid, metric))

        return [name for name in self.reads if holds(name)]

    def rows(self, evidence: Evidence) -> tuple[int, int]:
        """(How many rows of the source that has most may decide anything, how many it has)."""
        found = []
        for name in self.reads:
            table, _, column = name.partition(".")
            for grid in _read(evidence, name):
                if grid is not None:
                    own = grid if grid.is_metric else evidence.decisive(table, column)
                    found.append((len((own or grid).steps), len(grid.steps)))
        return max(found, default=(0, 0))


def _read(evidence: Evidence, name: str) -> tuple[Grid | None, Grid | None]:
    """A source of a detector as a table, or one of its columns, and as a metric."""
    table, _, column = name.partition(".")
    return evidence.grid(table, column), None if column else evidence.metric(*ALSO_CALLED.get(name, (name,)))


ALSO_CALLED = {"lr": ("lr", "learning_rate"), "loss": LOSSES}


DETECTORS: Registry[Detector] = Registry("detector", Room("stabilitylab.diagnose.detectors", "stabilitylab.detectors"))


def detector(
    kind: str,
    title: str,
    *,
    reads: Mapping[str, str],
    role: Role = "mechanism",
    least_rows: int = 0,
    explains: tuple[str, ...] = (),
    mild: bool = False,
) -> Callable[[F], F]:
    """Registers a function from :class:`Evidence` to events; the arguments are those of :class:`Detector`."""

    def decorate(find: F) -> F:
        entry = Detector(kind, title, reads, find, role, least_rows, explains, mild)
        DETECTORS.register(kind, module=find.__module__)(entry)
        return find

    return decorate
