"""Changes of the loop, from the ledger of updates, as events of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ..changes import Kind, LoopChange
from ..schema import Row
from .events import LEDGER, Event
from .evidence import Evidence

SETTING, BETWEEN = "setting", "between"  # acts in the update alone; reached the row before its forward pass
TOLD = 2  # changes of one kind and step whose sentences are given
ALWAYS = "watch(optimizer=optimizer)"  # what records the ledger


def change_events(
    evidence: Evidence,
    kind: str,
    title: str,
    phase: str,
    kinds: Sequence[Kind],
    chosen: Callable[[LoopChange], bool] = lambda change: True,
) -> Iterator[Event]:
    """Yield one event for all changes of one kind and step; a warning where one of them is accused.

    ``kinds``: those of the changes; ``chosen``: which of these count.
    """
    steps: dict[tuple[str, int], list[LoopChange]] = {}
    for change in evidence.changes:
        if change.kind in kinds and chosen(change):
            steps.setdefault((change.kind, change.step), []).append(change)
    for (_, step), found in sorted(steps.items(), key=lambda item: item[0][1]):
        yield _event(found, kind, title, phase, step)


def _event(found: Sequence[LoopChange], kind: str, title: str, phase: str, step: int) -> Event:
    first, *_ = ranked = sorted(found, key=lambda one: not one.accused)
    told = "; ".join(one.sentence.rstrip(".") for one in ranked[:TOLD])
    also = f"; and {len(ranked) - TOLD} more" if len(ranked) > TOLD else ""
    ends = [one.until for one in found]
    factor = first.factor
    return Event(
        kind,
        first.title or title,
        step,
        phase,
        f"{told}{also} ({first.evidence})",
        "warning" if first.accused else "note",
        after=None if first.from_start or not step else step - 1,
        until=None if None in ends or not first.lasts else max(end for end in ends if end is not None),
        place=Row(first.place),
        places=len(found),
        probe=LEDGER,
        numbers={} if factor is None or not math.isfinite(factor) else {"factor": factor},
        stands=any(one.stands for one in found),
        advice=first.remedy,
    )
