"""Findings from the ledger alone: a jump of the rate, another setting, a reset, a frozen parameter, a mode, a write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .. import changes
from ..changes import LoopChange, changes_of
from ..errors import listed
from .findings import AuditFinding, Kind
from .flight import Flight

# Changes that an audit reports, by the name that it has for them. The names of an audit are frozen: what is not here is
# reported by diagnose alone.
KINDS: Mapping[changes.Kind, Kind] = {
    "rate": "rate",
    "return": "rate",
    "fall": "rate",
    "setting": "setting",
    "reset": "optimizer reset",
    "frozen": "frozen",
    "mode": "mode",
    "attribute": "attribute",
    "write": "state written",
}


def fact_findings(flight: Flight) -> list[AuditFinding]:
    """Return the findings in the ledger's facts of the recorded updates, and of those before; of several processes in
    the facts of all, with the processes in the evidence if only some have the fact."""
    found = changes_of(flight.heard, len(flight.parameters), scheduled=flight.declared["scheduler"] is not None)
    shown = [one for one in found if one.kind in KINDS and one.is_compared and not one.from_start]
    return [_placed(_with_values(_finding(one), flight), flight) for one in shown]


def written(names: Sequence[str], step: int, total: int, evidence: str) -> AuditFinding:
    """Return the finding that tensors were written between the optimizer's steps of the updates ``step`` - 1 and
    ``step``."""
    return _finding(changes.written(names, step, total, evidence))


def dated(one: AuditFinding, when: str) -> AuditFinding:
    """Return a finding of :func:`written` whose sentence says more exactly when the tensors were written."""
    return replace(one, sentence=one.sentence.replace(changes.between(one.step), when))


def _with_values(one: AuditFinding, flight: Flight) -> AuditFinding:
    """Return the finding with the written tensors that are not finite, if a snapshot of this step was kept."""
    if one.kind != "state written" or one.step not in flight.snapshots:
        return one
    tensors = flight.snapshots[one.step]["tensors"]
    names = {fact["name"] for fact in flight.heard if fact["kind"] == "write" and fact["step"] == one.step}
    lost = sorted(name for name in names & tensors.keys() if not tensors[name].isfinite().all())
    return one.with_evidence(f"not finite afterwards: {listed(lost)}") if lost else one


def _placed(one: AuditFinding, flight: Flight) -> AuditFinding:
    """Return the finding with the processes that its facts come from, if others do not have them."""
    ranks = {who for (step, name), who in flight.partly.items() if step == one.step and one.place in name}
    if not ranks:
        return one
    return one.with_evidence(f"on {listed(sorted(ranks))} alone")


def _finding(one: LoopChange) -> AuditFinding:
    kind = KINDS[one.kind]
    return AuditFinding(kind, one.place, one.step, one.sentence, one.evidence, accused=one.accused, factor=one.factor)
