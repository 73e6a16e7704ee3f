"""Alarms raised while the run was trained (``watch(alarm=True)``), as events of its diagnosis."""

from __future__ import annotations

from collections.abc import Iterator

from ..alarm.reading import recorded
from ..schema import Row
from .events import Event, as_sentence
from .evidence import Evidence


def announced(evidence: Evidence) -> Iterator[Event]:
    """Yield a note for each alarm that run.json holds. docs/alarm.md has the error rates of alarms; a note leaves a run
    healthy."""
    for own in recorded(evidence.run.manifest):
        if not isinstance(own.get("step"), int):
            continue
        place, advice = own.get("place"), str(own.get("advice", ""))
        yield Event(
            "alarm",
            f"alarm: {own.get('title', '')}",
            own["step"],
            "update",
            str(own.get("sentence", "")),
            "note",
            place=_row(place) if isinstance(place, dict) else None,
            advice=as_sentence(advice) if advice else "",
            numbers={name: own[name] for name in ("score", "threshold", "since") if name in own},
        )


def _row(place: dict[str, object]) -> Row:
    layer = place.get("layer")
    site, stack, sublayer = (str(place.get(name, "")) for name in ("site", "stack", "sublayer"))
    return Row(site, stack, layer if isinstance(layer, int) else 0, sublayer)
