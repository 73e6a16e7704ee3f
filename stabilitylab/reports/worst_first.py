"""Which runs a report looks at first: what goes on, then what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from .collection import Record, Runs

SHOWN = 6  # runs whose layers are on the page, where none is named
BY_VERDICT = {"diverged": 0.0, "stuck": 1.0, "descending": 2.0, "learning": 4.0, "trained": 5.0}
BY_DIAGNOSIS = {"failure": 0.5, "warning": 1.5, "open": 2.5, "healthy": 4.5}
OTHERWISE = 3.0
MANY = 24  # so many runs that hold nothing out are diagnosed for their place; it takes a part of a second each


def shown(runs: Runs, names: Sequence[str] = ()) -> list[Record]:
    """Picks the runs whose layers the page shows: those of ``names`` that are there; without any, those that most need
    a look."""
    if not names:
        return named(runs, ())[:SHOWN]
    known = {record.name for record in runs}
    there = [name for name in names if name in known]
    return named(runs, there) if there else []


def named(runs: Runs, names: Sequence[str]) -> list[Record]:
    """Picks the runs of these names; without any, what goes on, then what went wrong, and one of each label before a
    second."""
    if names:
        known = {record.name: record for record in runs}
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"no run {unknown[0]!r} there; it has {', '.join(list(known)[:8])}.")
        return [known[name] for name in names]
    trained = [record for record in runs if record.kind != "onestep"]
    unjudged = [record.name for record in trained if record.verdict not in BY_VERDICT]
    places = {record.name: place(record, len(unjudged) <= MANY) for record in trained or runs}
    worst = sorted(trained or runs, key=lambda record: places[record.name])
    return sorted(worst, key=lambda record: [r.label for r in worst[: worst.index(record)]].count(record.label))


def place(record: Record, look: bool) -> float:
    """By its verdict; of a run that holds nothing out, by its diagnosis, where there is time to ``look``."""
    if record.status.state == "running":
        return -1.0
    if record.verdict in BY_VERDICT or not look or record.kind == "onestep":
        return BY_VERDICT.get(record.verdict, OTHERWISE)
    return OTHERWISE if record.diagnosis is None else BY_DIAGNOSIS[record.diagnosis.verdict]
