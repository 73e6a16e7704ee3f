"""Findings from the ledger alone: a jump of the rate, another setting, a reset, a frozen parameter, a mode, a write."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import listed
from .findings import AuditFinding, place_of
from .flight import Flight

JUMP = 1.5  # a rate that changes by this factor in one update jumps, unless a ramp or a schedule goes on
RAMP = 0.05  # two steps of a ramp are alike within this share, as differences or as factors
OFTEN = 3  # a setting that changes in so many updates on end is a schedule
EMPTY, FILLED = 0.9, 0.5  # moments are set to zero if their share of zeros goes from below FILLED to above EMPTY
SHAPE = ("foreach", "fused", "capturable", "differentiable", "initial_lr")  # settings that change no update


def fact_findings(flight: Flight) -> list[AuditFinding]:
    """Return the findings in the ledger's facts of the recorded updates, and of those before."""
    return [
        *_settings(flight),
        *_resets(flight),
        *_flags(flight),
        *_attributes(flight),
        *_writes(flight),
    ]


def _settings(flight: Flight) -> Iterator[AuditFinding]:
    changes: dict[str, dict[int, tuple[Any, Any]]] = defaultdict(dict)
    for fact in flight.facts:
        if fact["kind"] == "setting" and not fact["name"].endswith(SHAPE):
            changes[fact["name"]][fact["step"]] = fact["before"], fact["after"]
    for name, found in changes.items():
        group, _, key = name.rpartition(" ")
        scheduled = flight.declared["scheduler"] is not None
        for step, (before, after) in found.items():
            if key == "lr":
                if scheduled or not _jumps(found, step):
                    continue
                factor = after / before if before else math.inf
                yield AuditFinding(
                    "rate",
                    group,
                    step,
                    f"the learning rate of {group} changed from {before:g} to {after:g} at step {step} (x{factor:.3g})",
                    "the ledger of updates",
                    accused=_is_highest(found, step),
                    factor=factor,
                )
            elif not (scheduled and key in ("betas", "momentum")) and not _goes_on(found, step):
                said = f"{key} of {group} changed from {before} to {after} at step {step}"
                yield AuditFinding("setting", name, step, said, "the ledger of updates")


def _jumps(found: dict[int, tuple[Any, Any]], step: int) -> bool:
    """Return True if a rate changes by the factor JUMP, and no ramp goes on."""
    before, after = found[step]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in (before, after)):
        return True
    low, high = sorted((abs(before), abs(after)))
    if high < JUMP * low or (low == high == 0):
        return False
    for other in (step - 1, step + 1):
        if other in found:
            theirs = found[other]
            if math.isclose(theirs[1] - theirs[0], after - before, rel_tol=RAMP):
                return False
            if theirs[0] and before and math.isclose(theirs[1] / theirs[0], after / before, rel_tol=RAMP):
                return False
    return True


def _is_highest(found: dict[int, tuple[Any, Any]], step: int) -> bool:
    """Return True if a rate jumps above JUMP times all that the group had before. A fall, and a return to a former
    rate, are what schedules by hand and restarts do: a note."""
    before, after = found[step]
    known = [abs(one) for at, pair in found.items() if at < step for one in pair if isinstance(one, int | float)]
    return not math.isfinite(after) or abs(after) >= JUMP * max([abs(before), *known])


def _goes_on(found: dict[int, tuple[Any, Any]], step: int) -> bool:
    """Return True if the setting changes in at least OFTEN updates on end, this one among them."""
    first = last = step
    while first - 1 in found:
        first -= 1
    while last + 1 in found:
        last += 1
    return last - first + 1 >= OFTEN


def _resets(flight: Flight) -> Iterator[AuditFinding]:
    for fact in flight.facts:
        if fact["kind"] != "state":
            continue
        name, step, before, after = fact["name"], fact["step"], fact["before"], fact["after"]
        if name.endswith("parameters with state") and after < before:
            group = name.removesuffix(" parameters with state")
            said = f"the state of {group} was dropped at step {step}: {before - after} of {before} parameters lost it"
            yield AuditFinding("optimizer reset", group, step, said, "the ledger of updates")
        elif name.endswith("updates without a step") and after > before + 1:
            group = name.removesuffix(" updates without a step")
            if not _dropped(flight, group, step):
                said = f"the step count of {group} was set back by {after - before} at step {step}"
                yield AuditFinding("optimizer reset", group, step, said, "the ledger of updates")
        elif " share of zeros in " in name and before < FILLED and after > EMPTY:
            group, _, moment = name.partition(" share of zeros in ")
            said = f"{moment} of {group} was set to zero before step {step}"
            yield AuditFinding("optimizer reset", group, step, said, f"share of zeros {before:.0%}, then {after:.0%}")


def _dropped(flight: Flight, group: str, step: int) -> bool:
    name = f"{group} parameters with state"
    return any(f["name"] == name and step - 1 <= f["step"] <= step and f["before"] != f["after"] for f in flight.facts)


def _flags(flight: Flight) -> Iterator[AuditFinding]:
    frozen: dict[int, list[str]] = defaultdict(list)
    silent: dict[int, list[str]] = defaultdict(list)
    for fact in flight.facts:
        if fact["kind"] != "flag" or fact["after"] is not False:
            continue
        what, _, whose = fact["name"].partition(" of ")
        {"requires_grad": frozen, "training": silent}.get(what, defaultdict(list))[fact["step"]].append(whose)
    for step, names in frozen.items():
        said = f"{_counted(names, 'parameter')} stopped to require gradients at step {step}: {listed(names)}"
        yield AuditFinding("frozen", place_of(names, len(flight.parameters)), step, said, "the ledger of updates")
    for step, names in silent.items():
        whole = "the model" in names
        place = "the model" if whole else place_of(names, 0)
        said = f"{'the model' if whole else _counted(names, 'module')} was in eval mode from step {step} on"
        yield AuditFinding("mode", place, step, said + ("" if whole else f": {listed(names)}"), "the ledger of updates")


def _attributes(flight: Flight) -> Iterator[AuditFinding]:
    for fact in flight.facts:
        if fact["kind"] == "attribute":
            said = f"{fact['name']} changed from {fact['before']} to {fact['after']} at step {fact['step']}"
            yield AuditFinding("attribute", fact["name"], fact["step"], said, "the ledger of updates", accused=False)


def _writes(flight: Flight) -> Iterator[AuditFinding]:
    resets = {one.step for one in _resets(flight)}
    by_step: dict[int, list[str]] = defaultdict(list)
    for fact in flight.facts:
        if fact["kind"] == "write" and fact["before"] is not None and fact["step"] not in resets:
            by_step[fact["step"]].append(fact["name"])
    for step, names in by_step.items():
        yield written(names, step, len(flight.parameters), "digests before and after differ")


def written(names: Sequence[str], step: int, total: int, evidence: str) -> AuditFinding:
    """Return the finding that tensors were written between update ``step`` - 1 and update ``step``."""
    said = f"{_counted(names, 'tensor')} changed between the updates {step - 1} and {step}, which no optimizer did: "
    return AuditFinding("state written", place_of(list(names), total), step, said + listed(list(names)), evidence)


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''}"
