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
LEDGER = "ledger"  # the source of detectors that read the ledger of updates
LOOK = "Look at the place and the step of this event, and lower `lr` if nothing else is wrong there."
F = TypeVar("F", bound="Callable[[Evidence], Iterable[Event]]")


@dataclass(frozen=True)
class Event:
    """An event of a run, with its evidence.

    - ``step``: the row in which it was first seen; ``after``: the last row in which it was not seen.
    - ``until``: the step at which it ended (None: it lasted to the end, or its end is not known).
    - ``strength``: the number as a multiple of its threshold; None where that means nothing, as for a NaN.
    - ``severity``: a note leaves a run healthy; a failure means that the run did not learn, or broke.
    - ``open``: what may still come of a note that lasts to the end, as a clause ("the rank collapse may pass"). A run
      with such a note is not called healthy.
    - ``stands``: the condition of the event holds in the last rows of the run.
    - ``usual``: healthy runs have this condition too. It is trouble only if the run failed or its loss stopped
      falling.
    - ``judged_from``: the number of updates from which on it is judged; a shorter run leaves it open.
    - ``advice``: what to do, with its numbers; "" for the advice of its detector.
    - ``consequence``: why the event is a warning or a note, as a clause (:mod:`.consequence`).
    """

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
    stands: bool = False
    usual: bool = False
    judged_from: int = 0
    advice: str = ""
    consequence: str = ""

    @property
    def detector(self) -> Detector | None:
        """The detector of its kind; None for a kind without one, such as an alarm that was raised during training."""
        return DETECTORS[self.kind] if self.kind in DETECTORS else None  # noqa: SIM401 (get() raises UsageError)

    @property
    def role(self) -> Role:
        """The role of its kind. A ``setting`` comes from outside the network's dynamics. An ``outcome`` is the end of a
        run, and never the cause if any other event was seen."""
        return "mechanism" if self.detector is None else self.detector.role

    @property
    def names_cause(self) -> bool:
        """True if its kind says what was done or is set wrong, and not merely what was seen; and for what is seen
        before the first update, whose cause is the model and its initialisation."""
        return self.step == 0 or (self.detector is not None and self.detector.names_cause)

    @property
    def moment(self) -> tuple[int, int]:
        """Step and rank of the phase. Within a row, later moments depend on earlier moments."""
        return self.step, rank(self.phase)

    @property
    def resolved(self) -> bool:
        """True if the step before was recorded too, so that the event began at exactly this step."""
        return self.after is not None and self.after == self.step - 1

    @property
    def where(self) -> str:
        others = self.places - 1
        more = f" and {others} other place{'s' * (others > 1)}" if others else ""
        return describe(self.place) + more

    @property
    def sentence(self) -> str:
        """The evidence as a sentence."""
        return as_sentence(self.evidence)

    @property
    def remedy(self) -> str:
        """Its own advice, or that of its detector."""
        return self.advice or (LOOK if self.detector is None else self.detector.remedy)

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
            "remedy": self.remedy,
            "open": self.open,
            "stands": self.stands,
            "consequence": self.consequence,
            "numbers": dict(self.numbers),
        }


def as_sentence(clause: str) -> str:
    """Return a clause with a capital letter and a full stop; a name at its beginning stays as it is."""
    word = clause.partition(" ")[0]
    name = "_" in word or "." in word
    return f"{clause if name else clause[:1].upper() + clause[1:]}".rstrip(".") + "."


def alike(events: Sequence[Event]) -> list[list[Event]]:
    """Group events of one kind, stack and severity, since two tables often show the same finding."""
    found: dict[tuple[str, str, str], list[Event]] = {}
    for event in events:
        found.setdefault((event.kind, event.place.stack if event.place else "", event.severity), []).append(event)
    return list(found.values())


@dataclass(frozen=True)
class Detector:
    """A detector of one kind of event.

    - ``reads``: each source (table, column of a table, or metric) that is enough for it -> how to record the source.
    - ``least_rows``: the smallest number of rows in which it can decide.
    - ``explains``: kinds of events that follow from this kind by arithmetic, not by dynamics.
    - ``mild``: its events are notes in a run whose loss was judged and which learns.
    - ``names_cause``: its events say what was done, or what is set wrong; all others are signs of a cause.
    - ``in_steps``: the ledger reads what it needs as the optimizers step that ``watch`` was given.
    - ``nothing_to_check(evidence)``: why a run cannot have the sources, such as a model without a source; "" if they
      were only not recorded.
    - ``rule``: the quantity and the rule that decides, with the names of its thresholds; ``remedy``: the advice. The
      table of docs/detectors.md is made of both.
    """

    kind: str
    title: str
    reads: Mapping[str, str]
    find: Callable[[Evidence], Iterable[Event]]
    role: Role = "mechanism"
    least_rows: int = 0
    explains: tuple[str, ...] = ()
    mild: bool = False
    rule: str = ""
    remedy: str = ""
    names_cause: bool = False
    in_steps: bool = False
    nothing_to_check: Callable[[Evidence], str] = lambda evidence: ""

    def sources(self, evidence: Evidence) -> list[str]:
        """Return the sources of this detector that hold a number in this run."""

        def holds(name: str) -> bool:
            if name == LEDGER:
                return bool(evidence.facts)
            grid, metric = _read(evidence, name)
            if "." in name:  # a column may exist and hold no number
                return grid is not None and bool((~grid.absent & ~np.isnan(grid.values)).any())
            return any(one is not None and not one.absent.all() for one in (grid, metric))

        return [name for name in self.reads if holds(name)]

    def rows(self, evidence: Evidence) -> tuple[int, int]:
        """Return (decisive rows, all rows) of the source that has most of them."""
        found = []
        for name in self.reads:
            table, _, column = name.partition(".")
            if name == LEDGER and evidence.facts:
                found.append((len(evidence.steps),) * 2)
            for grid in _read(evidence, name):
                if grid is not None:
                    own = grid if grid.is_metric else evidence.decisive(table, column)
                    found.append((len((own or grid).steps), len(grid.steps)))
        return max(found, default=(0, 0))


def _read(evidence: Evidence, name: str) -> tuple[Grid | None, Grid | None]:
    """Read a source of a detector: (as a table or a column of a table, as a metric)."""
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
    rule: str = "",
    remedy: str = "",
    names_cause: bool = False,
    in_steps: bool = False,
    nothing_to_check: Callable[[Evidence], str] = lambda evidence: "",
) -> Callable[[F], F]:
    """Register a function from :class:`Evidence` to events; the arguments are those of :class:`Detector`."""

    def decorate(find: F) -> F:
        entry = Detector(
            kind, title, reads, find, role, least_rows, explains, mild, rule, remedy, names_cause, in_steps,
            nothing_to_check,
        )  # fmt: skip
        DETECTORS.register(kind, module=find.__module__)(entry)
        return find

    return decorate
