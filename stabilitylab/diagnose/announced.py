"""What the alarm said while the run was trained (``watch(alarm=True)``), on the time line of what happened."""

from __future__ import annotations

from collections.abc import Iterator

from ..alarm.reading import recorded
from ..schema import Row
from .events import Event
from .evidence import Evidence


def announced(evidence: Evidence) -> Iterator[Event]:
    """A note for each alarm that run.json holds: it was raised with the error rates of docs/alarm.md, and makes no run
    ill."""
    for own in recorded(evidence.run.manifest):
        if not isinstance(own.get("step"), int):
            continue
        place = own.get("place")
        yield Event(
            "alarm",
            f"alarm: {own.get('title', '')}",
            own["step"],
            "update",
            str(own.get("sentence", "")),
            "note",
            place=_row(place) if isinstance(place, dict) else None,
            numbers={name: own[name] for name in ("score", "threshold", "since") if name in own},
        )


def _row(place: dict[str, object]) -> Row:
    layer = place.get("layer")
    site, stack, sublayer = (str(place.get(name, "")) for name in ("site", "stack", "sublayer"))
    return Row(site, stack, layer if isinstance(layer, int) else 0, sublayer)
