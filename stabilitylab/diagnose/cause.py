"""The order of events: the first event, the events that followed, and the pairs whose order the rows do not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..schema import EVERY_ROW
from .events import Event
from .order import comes_before, depends_on


@dataclass(frozen=True)
class Cause:
    """The order of events. ``chain``: the first event of each kind. ``rivals``: events that may have come before the
    first event of the chain."""

    chain: tuple[Event, ...]
    rivals: tuple[Event, ...]

    @property
    def first(self) -> Event | None:
        return self.chain[0] if self.chain else None

    @property
    def together(self) -> tuple[Event, ...]:
        """The first event and its rivals of the same row, whose order no finer cadence would show."""
        return self.chain[:1] + tuple(rival for rival in self.rivals if together(self.chain[0], rival))


def ordered(events: Sequence[Event]) -> list[Event]:
    """Sort events by step, and within a step by what their numbers depend on. An outcome that held from the first row
    on (such as a plateau that the run never left) comes last: no row shows when it began."""
    return sorted(
        events,
        key=lambda event: (
            event.role == "outcome" and event.after is None,
            *event.moment,
            event.role != "setting",
            event.place is None,  # of two findings of one moment, the one that names a place
        ),
    )


def certainly_before(a: Event, b: Event) -> bool:
    """True if the rows show that ``a`` began before ``b``.

    There are three such cases. ``a`` was seen no later than the last row without ``b``. Both began at the same step,
    and the numbers of ``b`` depend on those of ``a``. ``a`` explains ``b`` by arithmetic, and was seen at an earlier
    step or, at the same step, in numbers on which those of ``b`` depend.
    """
    if b.after is not None and a.step <= b.after:
        return True
    leads = a.step < b.step or (a.step == b.step and comes_before(a.phase, b.phase))
    if a.detector is not None and b.kind in a.detector.explains and leads:
        return True
    return _same_step(a, b) and leads


def _same_step(a: Event, b: Event) -> bool:
    return a.step == b.step and ((a.resolved and b.resolved) or a.after is b.after is None)


def together(a: Event, b: Event) -> bool:
    """True if both events began at the same step, and the numbers of neither depend on those of the other."""
    return _same_step(a, b) and not comes_before(a.phase, b.phase) and not comes_before(b.phase, a.phase)


def explain(events: Sequence[Event]) -> Cause:
    """Return the chain of events and the rivals of its first event. Notes are left out; an outcome is never a rival."""
    kinds: dict[str, Event] = {}
    for event in ordered([event for event in events if event.severity != "note"]):
        kinds.setdefault(event.kind, event)
    chain = sorted(kinds.values(), key=lambda event: event.role == "outcome" and event.after is None)
    mechanisms = [event for event in chain if event.role != "outcome"]
    if not mechanisms or chain[0] is not mechanisms[0]:  # an outcome began earlier: a plateau that a later event ended
        return Cause(tuple(chain), ())
    rivals = [event for event in mechanisms[1:] if not certainly_before(chain[0], event)]
    return Cause(tuple(chain), tuple(rivals))


def sentence(cause: Cause) -> str:
    """Write the chain in words: ``learning-rate jump at step 40 -> update jump at step 40 -> loss spike at step 41``.

    "and" joins events of one row of which none comes first.
    """
    groups: list[list[Event]] = []
    for event in cause.chain:
        if groups and "outcome" not in (event.role, groups[-1][0].role) and together(groups[-1][0], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return " -> ".join(" and ".join([*(one.title for one in group[:-1]), _named(group[-1])]) for group in groups)


def undecided(cause: Cause) -> list[str]:
    """Write one sentence for each event that may have come before the first event."""
    first = cause.first
    return [] if first is None else [_between(first, rival) for rival in cause.rivals]


def _named(event: Event) -> str:
    if event.role == "outcome" and event.after is None:
        return f"{event.title} from the start"
    return f"{event.title} at step {event.step}"


def _between(a: Event, b: Event) -> str:
    head = f"the evidence does not decide between {_named(a)} and {_named(b)}"
    if together(a, b):
        return f"{head}: {why_together(a, b)}"
    gaps = [f"{event.title} began after step {event.after} and by step {event.step}" for event in (a, b)]
    return f"{head}: {gaps[0]}, {gaps[1]}; record with {EVERY_ROW} to tell them apart"


def why_together(*events: Event) -> str:
    """Say why none of these events of one row comes first."""
    many = "both" if len(events) == 2 else f"all {len(events)}"
    shared = {depends_on(event.phase) for event in events}
    if len(shared) == 1 and len({event.moment for event in events}) == 1:
        return f"{many} are seen in numbers that depend on {shared.pop()}"
    return "they are seen in numbers that do not depend on each other"
