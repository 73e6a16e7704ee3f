"""The consequence of findings: one rule by which a warning stays a warning, becomes a note, or is too early to tell.

Every event of every detector goes through :func:`weighed`. The rule looks at the loss after an event, and at the
condition that the event is about. It was committed before it was tried on any run. The last sentence of rule 5 came
later, from the choosing half of the second corpus (results/alarm/second), and rule 7 from a weight into which a NaN
was written.

1. A note stays a note. So does what ends a run: a failure, or an outcome such as a rise of the loss.
2. **Too early.** An event that is judged from a number of updates on (``Event.judged_from``: a loss that never fell, or
   stays somewhat above its start) is a note in a shorter run, and leaves it open. So is a warning with fewer than
   JUDGED_ROWS rows of the loss after it, unless rule 5, 6 or 7 has decided.
3. **Mild.** Events of mild detectors (a vanishing gradient) are notes in a run that learns, without a failure.
4. **The edge.** ``beyond_the_edge`` is a note unless the loss rose, or never fell: unless another event says so and is
   a warning or a failure.
5. **It stands.** A warning stays one if its condition holds in the last rows (``Event.stands``). A condition that
   healthy runs have too (``Event.usual``) counts so only in a run that failed.
6. **The loss.** Else a warning stays one unless the level of the loss reached a new minimum after it.
7. **The number that broke.** A warning that a tensor was written stays one if the first number that is not finite is in
   this tensor, before the forward pass of the same step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .events import Event
from .evidence import Evidence
from .series import JUDGED_ROWS, rows_after, went_on_learning

EDGE, WRITE = "beyond_the_edge", "foreign_write"
ROSE = ("early_explosion", "loss_spike", "loss_rise", "divergence", "plateau", "non_finite")  # are about the loss


def weighed(events: Sequence[Event], evidence: Evidence, learns: bool) -> list[Event]:
    """Return the events with the severity that their consequence gives, each with the reason.

    ``learns``: the loss of the run was judged, and it learns.
    """
    aged = [_of_a_short_run(event, evidence) for event in events]
    failed = any(event.severity == "failure" for event in aged)
    lost = next((event for event in aged if event.kind == "non_finite"), None)
    judged = [event if event.kind == EDGE else _judged(event, evidence, learns, failed, lost) for event in aged]
    rose = any(event.kind in ROSE and event.severity != "note" for event in judged)
    return [_of_the_edge(event, rose) if event.kind == EDGE else event for event in judged]


def _of_a_short_run(event: Event, evidence: Evidence) -> Event:
    """Return an event that a longer run may leave behind as a note; an explosion has happened, and is a warning."""
    count = updates(evidence)
    if event.severity == "note" or count >= event.judged_from:
        return event
    told = f"too early to tell after {count} updates: a {event.title} is judged from {event.judged_from} updates on"
    if event.kind == "early_explosion":
        back = "the loss may come back to its starting level"
        return replace(event, severity="warning", consequence=told, open=back, stands=True)
    return _noted(event, told, "the loss may still fall")


def updates(evidence: Evidence) -> int:
    """Count the updates of the record, from its first row on: a run may be watched from the middle on."""
    loss = evidence.loss()
    steps = evidence.steps if loss is None else loss.steps
    return int(steps[-1] - steps[0]) + 1 if len(steps) else 0


def _judged(event: Event, evidence: Evidence, learns: bool, failed: bool, lost: Event | None) -> Event:
    if event.severity != "warning" or event.role == "outcome":
        return event
    if lost is not None and _broke_in(event, lost):
        return replace(event, consequence="it holds the first number that is not finite")
    if event.detector is not None and event.detector.mild and learns and not failed:
        return replace(event, severity="note", consequence="the run learns")
    if event.stands and (failed or not event.usual):
        return replace(event, consequence=event.consequence or "still so at the last row")
    loss = evidence.loss()
    if loss is None:
        return replace(event, consequence="no loss was recorded that could show its consequence")
    if went_on_learning(loss, event.step):
        return replace(event, severity="note", consequence="the loss reached a new minimum after it")
    if (after := rows_after(loss, event.step)) < JUDGED_ROWS:
        rows = f"{after} row{'s' * (after != 1)} of the loss after it"
        told = f"too early to tell after {rows}: its consequence is judged from {JUDGED_ROWS} rows on"
        return _noted(event, told, f"it is too early to tell what the {event.title} at step {event.step} did")
    return replace(event, consequence=event.consequence or "the loss reached no new minimum after it")


def _broke_in(event: Event, lost: Event) -> bool:
    """True if the event wrote the tensor in which the first number that is not finite was found."""
    if event.kind != WRITE or event.step != lost.step or lost.numbers.get("kind") != "parameter" or lost.place is None:
        return False
    return re.search(rf"(?<![\w.]){re.escape(lost.place.site)}(?!\w|\.\w)", event.evidence) is not None


def _of_the_edge(event: Event, rose: bool) -> Event:
    if event.severity != "warning":
        return event
    severity = "warning" if rose else "note"
    return replace(event, severity=severity, consequence="the loss rose" if rose else "the loss did not rise")


def _noted(event: Event, told: str, still: str) -> Event:
    return replace(event, severity="note", evidence=f"{event.evidence}; {told}", consequence=told, open=still)
