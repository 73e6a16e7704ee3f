"""The order in which a report shows runs: running ones first, then those that went wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..errors import UsageError
from ..store.nonfinite import LOSSES
from .collection import Record, Runs

SHOWN = 6  # runs whose layers are on the page, where none is named
BY_VERDICT = {
    "diverged": 0.0,
    "stuck": 1.0,
    "ignores its source": 1.75,
    "descending": 2.0,
    "learning": 4.0,
    "trained": 5.0,
}
BY_DIAGNOSIS = {"failure": 0.5, "warning": 1.5, "open": 2.5, "healthy": 4.5}
NOT_FINITE = 0.25  # a failure for every detector, found without a diagnosis
OTHERWISE = 3.0
MANY = 24  # runs without a verdict that are diagnosed for the order; each takes a fraction of a second
TAIL = 10  # a loss of single batches is averaged over the last tenth


def shown(runs: Runs, names: Sequence[str] = ()) -> list[Record]:
    """Return the runs whose layers the page shows: the existing runs of ``names``; without names, the first SHOWN of
    :func:`worst_first`."""
    if not names:
        return worst_first(runs)[:SHOWN]
    known = {record.name: record for record in runs}
    return [known[name] for name in names if name in known]


def named(runs: Runs, names: Sequence[str]) -> list[Record]:
    """Return the runs of these names, in their order. Raises UsageError for an unknown name."""
    known = {record.name: record for record in runs}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no run {unknown[0]!r} there; it has {', '.join(list(known)[:8])}.")
    return [known[name] for name in names]


def worst_first(runs: Runs) -> list[Record]:
    """Return all training runs; one-step runs if there are no others.

    Running ones come first, then those that went wrong. One run of each label comes before a second run of any label,
    but for watched runs that are running or went wrong: these keep their own place.
    """
    trained = [record for record in runs if record.kind != "onestep"] or list(runs)
    unjudged = [record for record in trained if record.verdict not in BY_VERDICT and record.kind != "onestep"]
    looked = {record.name for record in sorted(unjudged, key=_promising)[:MANY]}
    places = {record.name: place(record, record.name in looked) for record in trained}
    rounds, seen = {}, Counter()
    for record in sorted(trained, key=lambda record: places[record.name]):
        # The label of a loop of one's own is the class of its model, and no run of it repeats another with a new seed.
        own = record.kind == "watched" and places[record.name] < OTHERWISE
        rounds[record.name] = 0 if own else seen[record.label]
        seen[record.label] += not own
    return sorted(trained, key=lambda record: (rounds[record.name], places[record.name]))


def place(record: Record, look: bool) -> float:
    """Return the sort key of a run, smallest for a running one.

    The key comes from its verdict. Without a verdict it comes from non-finite numbers, and with ``look`` from its
    diagnosis.
    """
    if record.status.state == "running":
        return -1.0
    if record.verdict in BY_VERDICT or record.kind == "onestep":
        return BY_VERDICT.get(record.verdict, OTHERWISE)
    if record.lost:
        return NOT_FINITE
    return BY_DIAGNOSIS[record.diagnosis.verdict] if look and record.diagnosis is not None else OTHERWISE


def _promising(record: Record) -> tuple[bool, float]:
    """Return the sort key by which runs are diagnosed: non-finite runs first, then those whose loss fell least."""
    if record.lost:
        return False, 0.0
    for name in LOSSES:
        if name in record.metrics and len(loss := record.metrics[name].dropna()):
            last = float(loss.iloc[-math.ceil(len(loss) / TAIL) :].mean())
            return True, (float(loss.iloc[0]) - last) / (abs(float(loss.iloc[0])) or 1.0)
    return True, 0.0
