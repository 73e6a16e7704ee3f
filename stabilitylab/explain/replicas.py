"""Replicas: the processes of DistributedDataParallel record a flight each, and replay and judge theirs together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..changes import place_of
from ..errors import InputError, StabilityLabError, UsageError, listed
from ..probes.parameters.pipeline import Pipeline
from ..probes.parameters.processes import ALONE, Processes
from ..probes.parameters.spreading import spread_out
from ..probes.places.naming import unwrapped
from .findings import AuditFinding, Kind
from .flight import Flight
from .sketches import Sketches

T = TypeVar("T")
# Kinds of the differences within one update, in the order in which things are done; what is not here comes last.
ORDER: tuple[Kind, ...] = ("schedule", "state written", "unexplained", "forward", "loss")


def averaging(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel among the wrappers of ``model``, which averages its gradients; else None."""
    inner = unwrapped(model)
    around = (each for each in model.modules() if isinstance(each, DistributedDataParallel))
    return next((each for each in around if unwrapped(each) is inner), None)


def why_not(model: nn.Module, processes: Processes) -> str:
    """Return why the updates of a model on these processes cannot be replayed; "" if they can."""
    if processes.alone:
        return ""
    if isinstance(processes, Pipeline):
        return "it is a pipeline, whose stages cannot be replayed yet"
    if processes.sharded:
        return "its parameters are spread over processes, whose updates cannot be replayed yet"
    if averaging(model) is None:
        return "it runs in several processes, and the watched model is not a DistributedDataParallel"
    return ""


def processes_of(flight: Flight, model: nn.Module) -> Processes:
    """Return the processes that replay a flight: as many as recorded it. Raises UsageError for another number."""
    recorded = int(flight.start.get("ranks", 1))
    if recorded == 1:
        return ALONE
    found = ALONE if averaging(model) is None else spread_out(model)
    if found.size != recorded:
        raise UsageError(
            f"{recorded} processes recorded this run: start as many, as with torchrun --nproc-per-node {recorded} -m "
            "stabilitylab explain RUN --factory PACKAGE.MODULE:FUNCTION, whose function joins the process group and "
            "returns the DistributedDataParallel model."
        )
    return found


def on_each(processes: Processes, action: Callable[[], T]) -> T:
    """Return ``action()``. If it fails on one process, raise InputError on all of them, so that none waits."""
    if processes.alone:
        return action()
    result, why = None, ""
    try:
        result = action()
    except StabilityLabError as error:
        why = str(error)
    if failed := [(rank, told) for rank, told in enumerate(processes.gathered(why)) if told]:
        raise InputError(f"rank {failed[0][0]}: {failed[0][1]}")
    assert result is not None, "the action has a result"
    return result


def agreed(flight: Flight, processes: Processes) -> Flight:
    """Return the flight with what every process has: the snapshots, updates and full looks that all of them kept, and
    :attr:`~.flight.Flight.heard`, the facts of all. Raises InputError if they have no snapshot in common, or recorded
    different troubles."""
    if processes.alone:
        return flight
    mine = {step: update.full is not None for step, update in flight.updates.items()}
    each = processes.gathered((set(flight.snapshots), mine, flight.trouble, flight.facts, flight.notes))
    snapshots = set.intersection(*(one[0] for one in each))
    if not snapshots or len({None if one[2] is None else one[2]["step"] for one in each}) > 1:
        raise InputError("the black boxes of the processes do not belong together: record the loop again.")
    shared = set.intersection(*(set(one[1]) for one in each))
    full = {step for step in shared if all(one[1][step] for one in each)}
    kept = replace(
        flight,
        snapshots={step: state for step, state in flight.snapshots.items() if step in snapshots},
        updates={
            step: update if step in full else replace(update, full=None)
            for step, update in flight.updates.items()
            if step in shared
        },
        notes=list(dict.fromkeys(note for one in each for note in one[4])),
    )
    kept.heard, kept.partly = _union([one[3] for one in each])
    return kept


def first_difference(found: Sequence[AuditFinding], processes: Processes) -> list[AuditFinding]:
    """Return the differences of one update on the process where they begin first, in the order in which things are
    done; the evidence names the processes if only some have any."""
    if processes.alone:
        return list(found)
    each = processes.gathered(list(found))
    having = [rank for rank, own in enumerate(each) if own]
    if not having:
        return []
    first = min(having, key=lambda rank: (_order(each[rank][-1].kind), rank))
    alike = [rank for rank in having if each[rank][-1].kind == each[first][-1].kind]
    return [_on(one, alike, processes) for one in each[first]]


def first_names(names: Sequence[str], processes: Processes) -> list[str]:
    """Return the names of the first process that has any."""
    return next((own for own in processes.gathered(list(names)) if own), [])


def joined(found: Iterable[AuditFinding], processes: Processes) -> list[AuditFinding]:
    """Return the findings of all processes, those of the same kind, place and updates once."""
    if processes.alone:
        return list(found)
    known: dict[tuple[Any, ...], tuple[AuditFinding, list[int]]] = {}
    for rank, own in enumerate(processes.gathered(list(found))):
        for one in own:
            known.setdefault((one.kind, one.place, one.step, one.until, one.factor), (one, []))[1].append(rank)
    return [_on(one, having, processes) for one, having in known.values()]


def differing_replicas(flight: Flight, processes: Processes) -> list[AuditFinding]:
    """Return the finding that copies of parameters differed between processes before an update, with its first update;
    [] if they never did in the updates with sketches."""
    if processes.alone:
        return []
    own = {
        step: Sketches.of(update.full["before"]).digests.tolist()
        for step, update in sorted(flight.updates.items())
        if update.full is not None and "before" in update.full
    }
    each = processes.gathered(own)
    for step in own:
        apart = [at for at, digests in enumerate(zip(*(one[step] for one in each), strict=True)) if len({*digests}) > 1]
        if apart:
            names = [flight.parameters[at] for at in apart]
            said = f"the copies of {listed(names)} differ between processes, from update {step} on at the latest"
            evidence = f"digests before the step of update {step}: {len(apart)} of {len(flight.parameters)} differ"
            return [AuditFinding("replicas", place_of(names, len(flight.parameters)), step, said, evidence)]
    return []


def mean(value: float, processes: Processes, device: torch.device) -> float:
    """Return the mean over processes."""
    if processes.alone:
        return value
    return float(processes.mean(torch.tensor([value], dtype=torch.float64), device)[0])


def ranks_of(having: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 0 and 2"."""
    return f"rank{'s' * (len(having) > 1)} {listed([*map(str, having)])}"


def _on(one: AuditFinding, having: Sequence[int], processes: Processes) -> AuditFinding:
    if len(having) == processes.size:
        return one
    return one.with_evidence(f"on {ranks_of(having)} alone")


def _order(kind: Kind) -> int:
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _union(each: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], dict[tuple[int, str], str]]:
    """Return the facts of all processes in the order of their updates, and the ranks of those that only some have."""
    known: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for rank, own in enumerate(each):
        for fact in own:
            known.setdefault(repr(sorted(fact.items())), (dict(fact), []))[1].append(rank)
    facts = sorted(known.values(), key=lambda one: (one[0]["step"], one[0]["kind"], one[0]["name"], one[1]))
    partly = {(one["step"], one["name"]): ranks_of(having) for one, having in facts if len(set(having)) < len(each)}
    return [one for one, _ in facts], partly
