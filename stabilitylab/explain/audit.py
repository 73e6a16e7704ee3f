"""The audit: declared updates replayed from snapshots. The first quantity that differs is the finding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..changes import place_of
from ..errors import listed
from ..probes.places.naming import parameters_of
from ..probes.state.bits import same_bits
from .facts import dated, fact_findings, written
from .findings import AuditFinding, first_of_each
from .flight import Flight, RecordedUpdate
from .relations import Relation, common, relations
from .replay import DeclaredLoop, ReplayChange, Replayed, UpdateReplay
from .replicas import differing_replicas, first_difference, first_names
from .sketches import Sketches
from .states import State, is_kept

MOST = 400  # updates that an audit replays, in all
LASTING = ("forward", "loss", "gradients added", "gradient sign", "gradient scale", "gradient zero", "gradient",
           "clipping", "update scale", "update sign", "update zero", "update")  # fmt: skip
ROUNDED = 1e-6  # of a sum of losses in float32
SUMMED = 1e-4  # a factor that near to 1 is rounding, where several processes add up gradients
MOSTLY = 0.9  # so many tensors that differ are an update, fewer a write


@dataclass
class AuditResult:
    """The result of an audit. ``findings``: facts of the ledger and differences, by step. ``replayed``: updates that
    were done again; ``equal``: those of them in which every recorded bit was the same. ``parted``: (step, sentence) of
    each segment that parted; ``between``: those of them whose updates were equal, and not the state before this step.
    ``full``: replayed updates with sketches. ``tried``: updates that were replayed for hypotheses. ``unchecked``: what
    could not be compared, and why."""

    findings: list[AuditFinding] = field(default_factory=list)
    replayed: int = 0
    equal: int = 0
    full: int = 0
    tried: int = 0
    parted: list[tuple[int, str]] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """True if every replayed update had equal bits, and each segment reached its next snapshot."""
        return self.replayed == self.equal and not self.parted

    @property
    def accused(self) -> list[AuditFinding]:
        return [one for one in self.findings if one.accused]

    def as_dict(self) -> dict[str, Any]:
        parted = [{"step": step, "first": sentence} for step, sentence in self.parted]
        return {"replayed": self.replayed, "equal": self.equal, "full": self.full, "parted": parted}


class Auditor:
    """Replays the segments between snapshots; after a difference it goes on at the next snapshot."""

    def __init__(self, flight: Flight, loop: DeclaredLoop, most: int = MOST) -> None:
        self.flight, self.loop, self._most = flight, loop, most
        self.result = AuditResult()
        self._has_loss = True
        self._start = 0  # of the segment that is replayed
        self._when: dict[int, str] = {}  # step of a write that the ledger saw -> when it was, where the replay shows it

    @property
    def count(self) -> int:
        """The number of updates that an audit without differences replays."""
        return sum(stop - start for start, stop, _ in self._segments())

    def _segments(self) -> list[tuple[int, int, int | None]]:
        """Return the segments to replay: first update, end, and the snapshot there if there is one."""
        flight, starts = self.flight, sorted(self.flight.snapshots)
        each = max(1, self._most // max(1, len(starts)))
        ends = [*starts[1:], flight.last + 1]
        return [
            (start, min(stop, start + each), stop if stop in flight.snapshots else None)
            for start, stop in zip(starts, ends, strict=True)
        ]

    def run(self) -> AuditResult:
        """Audit the flight; the loop's objects are left as they were."""
        flight, result = self.flight, self.result
        found = [*fact_findings(flight), *differing_replicas(flight, self.loop.processes)]
        segments = self._segments()
        self._trust_loss([start for start, _, _ in segments])
        with self.loop.kept():
            for segment in segments:
                found += self._segment(*segment)
        found = [
            dated(one, self._when[one.step]) if one.kind == "state written" and one.step in self._when else one
            for one in found
        ]
        result.findings = first_of_each(_dated(_without_doubles(found)))
        if any(update.stepped is False for update in flight.updates.values()) and self.loop.scaler is None:
            result.unchecked.append("updates in which no optimizer stepped were replayed without a step")
        return result

    def _trust_loss(self, starts: Sequence[int]) -> None:
        """See at the first full update if the recorded loss is that of ``loss_fn``; else losses are not compared."""
        for start in starts:
            update = self.flight.updates.get(start)
            if update is None or update.full is None or update.loss is None:
                continue
            with self.loop.kept():
                one = next(UpdateReplay(self.flight, self.loop).run(start, start + 1, look=True))
            gradient = Sketches.of(update.full["gradient"]).differing(one.full["gradient"])
            if self.loop.on_any(not gradient and not self._same_loss(update, one.loss)):
                self._has_loss = False
                self.result.unchecked.append("the loss given to w.step() is not what loss_fn returns; not compared")
            return

    def _segment(self, start: int, stop: int, snapshot: int | None) -> list[AuditFinding]:
        """Replay from a snapshot; ``snapshot``: the next one, which the replay must reach bit for bit."""
        replay, verified = UpdateReplay(self.flight, self.loop), start
        self._start = start
        replay.begin(start)
        for update in self.flight.replayable(start):
            if update.step >= stop:
                break
            one = replay.update(update, look=True)
            self.result.replayed += 1
            self.result.full += update.full is not None
            found = first_difference([*self._compare(update, one, verified)], self.loop.processes)
            if found:
                self.result.parted.append((update.step, found[0].sentence))
                if all(finding.kind == "unexplained" for finding in found):
                    found = [*self._by_hypothesis(start, verified, update.step), *found][:1]
                return found
            self.result.equal += 1
            verified = update.step
        if snapshot is not None and verified == snapshot - 1:
            state = self.loop.captured()
            names = differing_state(self.flight.snapshots[snapshot], state)
            if names := first_names(names, self.loop.processes):
                self.result.parted.append((snapshot, f"{names[0]} is another in the snapshot"))
                self.result.between.append(snapshot)
                return self._at_snapshot(start, snapshot, names, state)
        return []

    def _at_snapshot(self, start: int, snapshot: int, names: Sequence[str], state: State) -> list[AuditFinding]:
        """Return the finding about a snapshot that the replay does not reach: a few tensors were written between two
        updates; if almost all differ, the update before is not the declared one."""
        if told := self._told_write(snapshot - 1, snapshot):
            return [told]
        if len(names) < MOSTLY * (len(state["tensors"]) + moments_of(state)):
            return [written(names, snapshot, len(self.flight.parameters), "the replay parts from the snapshot")]
        if found := self._by_hypothesis(start, snapshot - 1, snapshot):
            return found
        said = f"update {snapshot - 1} is not the declared one: {len(names)} tensors differ after it"
        evidence = f"bits were equal up to the loss of update {snapshot - 1}"
        return [AuditFinding("unexplained", "the whole model", snapshot, said, evidence)]

    def _compare(self, update: RecordedUpdate, one: Replayed, verified: int) -> Iterator[AuditFinding]:
        """Yield the first difference in an update, in the order in which things are done."""
        full, step = update.full or {}, update.step
        if one.declared_settings is not None and update.settings is not None:
            yield from self._schedule(step, update.settings, one.declared_settings)
        before = self._differing(full, one, "before")
        if before and (step > verified or self._writes(step, step)):
            self._note_when(update, one)
            yield self._state(before, verified, step)
            return
        if (
            "outputs" in full
            and "outputs" in one.full
            and (where := _first_other(full["outputs"], one.full["outputs"]))
        ):
            said = f"the forward pass of update {step} differs from the declared one, first in {where}"
            yield AuditFinding("forward", where, step, said, "digests of modules' outputs, in the order of their calls")
            return
        gradient = self._differing(full, one, "gradient")
        if gradient:
            yield self._gradient(full, one, gradient, step, update)
            return
        if self._has_loss and not self._same_loss(update, one.loss):
            yield self._loss(update, one, verified)
            return
        if handed := self._differing(full, one, "handed"):
            yield self._handed(full, one, handed, step)
            return
        if after := self._differing(full, one, "after"):
            moments = [name for name in self._writes(step, step) if " of " in name]
            told = self._told_write(step, step) if moments else None
            yield told or self._update(full, one, after, step)

    def _differing(self, full: Mapping[str, Any], one: Replayed, what: str) -> list[int]:
        if what not in full or what not in one.full:
            return []
        return Sketches.of(full[what]).differing(one.full[what])

    def _state(self, at: Sequence[int], verified: int, step: int) -> AuditFinding:
        if told := self._told_write(verified, step):
            return told
        names = [self.flight.parameters[number] for number in at]
        total = len(self.flight.parameters)
        if len(names) < total:
            return written(names, step, total, f"bits were equal up to update {verified}, and others were equal here")
        said = f"an update after {verified} and before {step} is not the declared one"
        return AuditFinding(
            "unexplained", "the whole model", verified, said, "parameters before the step differ in all tensors"
        )

    def _writes(self, first: int, last: int) -> dict[str, int]:
        """Return the tensors that the ledger saw written before the optimizer's step of one of these updates, each with
        that update."""
        facts = [fact for fact in self.flight.heard if fact["kind"] == "write" and first <= fact["step"] <= last]
        return {fact["name"]: fact["step"] for fact in reversed(facts)}

    def _told_write(self, verified: int, step: int) -> AuditFinding | None:
        """Return the finding about tensors that the ledger saw written after the forward pass of update ``verified``
        and up to ``step``; None if it saw none. A snapshot before ``verified`` may hold what was written there."""
        found = self._writes(verified + (verified == self._start < step), step)
        if not found:
            return None
        first = min(found.values())
        names = [name for name, at in reversed(found.items()) if at == first]
        if first == verified < step and self._has_loss and self.flight.updates[first].loss is not None:
            self._set_when(first, f"after the forward pass of update {first} and before its optimizer step")
        return written(names, first, len(self.flight.parameters), "the ledger, and the replay parts there")

    def _note_when(self, update: RecordedUpdate, one: Replayed) -> None:
        """Note that the write in this update came after a pass that is equal without it."""
        if self._has_loss and not self._same_loss(update, one.loss):
            return
        if update.full and "gradient" in update.full and not self._differing(update.full, one, "gradient"):
            when = f"in update {update.step}, after its backward pass and before its optimizer step"
            self._set_when(update.step, when)

    def _set_when(self, step: int, when: str) -> None:
        """Note when parameters were written; passes do not show when moments were."""
        if not any(" of " in name for name in self._writes(step, step)):
            self._when[step] = when

    def _loss(self, update: RecordedUpdate, one: Replayed, verified: int) -> AuditFinding:
        step = update.step
        if told := self._told_write(verified, step):
            return told
        if update.full:
            return _other_loss(update, one)
        said = f"the loss of update {step} is {update.loss:.9g}, and the declared updates give {one.loss:.9g}"
        evidence = f"bits were equal up to update {verified}; record digests=1 to see which quantity parts"
        return AuditFinding("unexplained", "the whole model", step, said, evidence)

    def _gradient(
        self, full: Mapping[str, Any], one: Replayed, at: Sequence[int], step: int, update: RecordedUpdate
    ) -> AuditFinding:
        added = {"left": full["left"]["numbers"]} if "left" in full else {}
        finding = self._related(full["gradient"], one.full["gradient"], at, step, "after backward", added)
        lossless = self._has_loss and not self._same_loss(update, one.loss)
        parts = len(update.batches)
        if finding.kind == "gradient scale" and parts > 1 and finding.place == "the whole model":
            divided = finding.factor is not None and math.isclose(finding.factor, 1 / parts, rel_tol=1e-3)
            if divided and self.loop.accumulate == 1:
                said = f"the losses of update {step} are divided by {parts}, its number of micro-batches"
                told = 'it was not declared: Recorder(accumulate="batches")'
                return replace(finding, sentence=said, evidence=told, accused=False)
        return _other_loss(update, one) if finding.kind == "gradient" and lossless else finding

    def _related(
        self,
        recorded: Mapping[str, Any],
        replayed: Sketches,
        at: Sequence[int],
        step: int,
        when: str,
        added: Mapping[str, Tensor] | None = None,
    ) -> AuditFinding:
        """Return the finding about gradients that differ, by their relation to the declared ones."""
        mine = Sketches.of(dict(recorded))
        there = list(zip(mine.there, replayed.there, strict=True))
        found = relations(mine.numbers, replayed.numbers, there, at, added or {})
        names = [self.flight.parameters[number] for number in at]
        total = sum(replayed.there)
        known = common(found)
        if known is None:  # several at once: that of most tensors is told
            known, names = self._most_frequent(found)
        place = place_of(names, total)
        evidence = f"{len(at)} of {total} gradients {when} differ from those of the declared backward"
        if not self.loop.processes.alone and known.kind == "scale" and abs(known.factor - 1) < SUMMED:
            said = f"gradients of update {step} differ by rounding: processes added them up in another order"
            return AuditFinding("gradient", place, step, said, evidence, accused=False)
        return _gradient_finding(known, place, step, when, evidence)

    def _most_frequent(self, found: Mapping[int, Relation]) -> tuple[Relation, list[str]]:
        kinds = [_rounded(one) for one in found.values()]
        top = max(kinds, key=lambda kind: (kind[0] != "other", kinds.count(kind)))
        own = {number: one for number, one in found.items() if _rounded(one) == top}
        return next(iter(own.values())), [self.flight.parameters[number] for number in own]

    def _handed(self, full: Mapping[str, Any], one: Replayed, at: Sequence[int], step: int) -> AuditFinding:
        """Return the finding about gradients that the optimizer got: changed after ``w.step``."""
        mine, theirs = Sketches.of(full["handed"]), one.full["handed"]
        there = list(zip(mine.there, theirs.there, strict=True))
        known = common(relations(mine.numbers, theirs.numbers, there, at, {}))
        clipped = known is not None and known.kind == "scale" and 0 < known.factor < 1
        whole = len(at) == sum(bool(n) for n in theirs.numbers[:, 0].tolist())
        if known is not None and clipped and whole:
            said = (
                f"gradients are scaled by {known.factor:.4g} between w.step() and the optimizer's step of update {step}"
            )
            return AuditFinding(
                "clipping", "the whole model", step, f"{said}, as an undeclared clipping does", "", accused=False,
                factor=known.factor,
            )  # fmt: skip
        if known is not None and known.kind == "scale" and whole and self.loop.clip is not None and known.factor > 1:
            said = (
                f"the declared clipping was not made in update {step}: gradients are {known.factor:.4g} times as large"
            )
            return AuditFinding("gradient scale", "the whole model", step, said, factor=known.factor)
        return self._related(full["handed"], theirs, at, step, "as the optimizer steps")

    def _update(self, full: Mapping[str, Any], one: Replayed, at: Sequence[int], step: int) -> AuditFinding:
        """Return the finding about the optimizer's step: the change of parameters, by its relation to the declared."""
        mine = full["after"]["numbers"] - full["before"]["numbers"]
        theirs = one.full["after"].numbers - one.full["before"].numbers
        still = [number for number in at if bool((full["after"]["digests"] == full["before"]["digests"])[number])]
        names = [self.flight.parameters[number] for number in at]
        total = len(self.flight.parameters)
        if still and len(still) == len(at):
            said = f"update {step} did not change {listed(names)}, and the declared one does"
            return AuditFinding("update zero", place_of(names, total), step, said, "digests before and after the step")
        factors = [
            float(mine[number, k] / theirs[number, k]) for number in at for k in (1, 2) if abs(theirs[number, k]) > 0
        ]
        middle = sorted(factors)[len(factors) // 2] if factors else float("nan")
        close = sum(abs(one_ - middle) <= 0.02 * abs(middle) for one_ in factors)
        place = place_of(names, total)
        evidence = f"{len(at)} of {total} tensors differ after the step, with equal gradients and settings"
        if factors and close >= 0.8 * len(factors) and abs(middle - 1) > 0.02:
            kind = "update sign" if middle < 0 else "update scale"
            said = f"update {step} is {middle:.4g} times the declared one"
            return AuditFinding(kind, place, step, said, evidence, factor=middle)
        return AuditFinding("update", place, step, f"update {step} is not the declared one", evidence)

    def _schedule(self, step: int, recorded: Any, declared: Any) -> Iterator[AuditFinding]:
        for number, (mine, theirs) in enumerate(zip(recorded, declared, strict=True)):
            for at, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                rate, should = float(one.get("lr", 0)), float(other.get("lr", 0))
                if rate != should:
                    group = f"optimizer {number} group {at}"
                    factor = rate / should if should else float("inf")
                    said = f"the learning rate of {group} is {rate:g} at step {step}, and the schedule's is {should:g}"
                    yield AuditFinding("schedule", group, step, said, "the declared scheduler, replayed", factor=factor)

    def _by_hypothesis(self, start: int, verified: int, step: int) -> list[AuditFinding]:
        """Try one change of update ``verified`` after another: the one after which update ``step``, the next, begins
        with the recorded bits is what happened, though no sketch of that update was kept."""
        if step != verified + 1:
            return []
        recorded, kept = self.flight.updates.get(step), self.flight.snapshots.get(step)
        for finding, change in hypotheses(verified):
            replay = UpdateReplay(self.flight, self.loop, change)
            losses = replay.losses(start, step + (kept is None))
            self.result.tried += len(losses)
            if kept is not None:
                state = self.loop.captured()
                names = differing_state(kept, state)
                is_reached = not first_names(names, self.loop.processes)
            elif recorded is not None and recorded.loss is not None and losses and self._has_loss:
                is_reached = self._same_loss(recorded, losses[-1])
            else:
                is_reached = False
            if is_reached:
                return [finding]
        return []

    def _same_loss(self, update: RecordedUpdate, loss: float) -> bool:
        """Return True if the recorded loss is this one, or there is none. Of one batch each bit counts; losses of
        several batches or processes were added in an order, and rounded to a type, that only the loop knows."""
        if update.loss is None or update.loss == loss or (math.isnan(update.loss) and math.isnan(loss)):
            return True
        is_sum = len(update.batches) > 1 or not self.loop.processes.alone
        return is_sum and math.isclose(update.loss, loss, rel_tol=ROUNDED)


def hypotheses(step: int) -> Iterator[tuple[AuditFinding, ReplayChange]]:
    """Yield changes of one update, each with the finding that it would be. Their order is that of the list."""

    def scaled(factor: float) -> ReplayChange:
        def act(t: int, loop: DeclaredLoop) -> None:
            if t == step:
                for parameter in loop.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

        return ReplayChange(gradients=act)

    def rated(factor: float) -> ReplayChange:
        def settings(t: int, recorded: list[list[State]]) -> list[list[State]]:
            return recorded if t != step else [[{**g, "lr": g["lr"] * factor} for g in groups] for groups in recorded]

        return ReplayChange(settings=settings)

    left: dict[str, Tensor] = {}

    def add(t: int, loop: DeclaredLoop) -> None:
        for name, parameter in parameters_of(loop.model).items():
            if parameter.grad is None:
                continue
            if t == step - 1:
                left[name] = parameter.grad.clone()
            elif t == step and name in left:
                parameter.grad.add_(left[name])

    evidence = f"with this change update {step + 1} begins with the recorded bits"
    whole = "the whole model"
    said = f"the gradients of update {step} were negated"
    yield AuditFinding("gradient sign", whole, step, said, evidence, factor=-1.0), scaled(-1.0)
    said = f"the gradients of update {step} are this batch's plus the ones before: zero_grad is missing"
    yield AuditFinding("gradients added", whole, step, said, evidence), ReplayChange(gradients=add)
    said = f"the gradients of update {step} were zero"
    yield AuditFinding("gradient zero", whole, step, said, evidence), scaled(0.0)
    for factor in (2.0, 10.0, 100.0, 0.5, 0.1):
        said = f"update {step} was made with {factor:g} times the rate that its group had"
        yield AuditFinding("update scale", whole, step, said, evidence, factor=factor), rated(factor)
        said = f"the gradients of update {step} were {factor:g} times the declared ones"
        yield AuditFinding("gradient scale", whole, step, said, evidence, factor=factor), scaled(factor)


def moments_of(state: State) -> int:
    """Return the number of tensors in the optimizers' state, without those of no dimension, which count steps."""
    entries = (one for each in state["optimizers"] for own in each["state"].values() for one in own.values())
    return sum(is_kept(one) and one[0].dim() > 0 for one in entries)


def differing_state(kept: State, state: State) -> list[str]:
    """Return the names of tensors that differ between two captured states: of the model, and of the optimizers."""
    names = [name for name, one in kept["tensors"].items() if not same_bits(one, state["tensors"].get(name, one))]
    for mine, theirs in zip(kept["optimizers"], state["optimizers"], strict=True):
        members = [name for group in theirs["members"] for name in group]
        for number, entries in theirs["state"].items():
            other = mine["state"].get(number, {})
            for key, value in entries.items():
                if is_kept(value):
                    there = other.get(key)
                    if there is None or not same_bits(value[0], there[0]):
                        names.append(f"{key} of {members[number]}")
    return names


def _other_loss(update: RecordedUpdate, one: Replayed) -> AuditFinding:
    said = f"the loss of update {update.step} is {update.loss:.9g}, and loss_fn gives {one.loss:.9g} for its batch"
    return AuditFinding("loss", "the loss", update.step, said, "parameters and outputs of modules are equal")


def _gradient_finding(known: Relation, place: str, step: int, when: str, evidence: str) -> AuditFinding:
    whose = "the gradients" if place == "the whole model" else f"the gradient of {place}"
    if known.kind == "left":
        said = f"{whose} of update {step} are this batch's plus the ones before: zero_grad is missing"
        return AuditFinding("gradients added", place, step, said, evidence)
    if known.kind in ("zero", "missing"):
        return AuditFinding("gradient zero", place, step, f"{whose} {when} is zero in update {step}", evidence)
    if known.kind == "scale" and abs(known.factor + 1) < 1e-3:
        said = f"{whose} {when} has the opposite sign in update {step}"
        return AuditFinding("gradient sign", place, step, said, evidence, factor=known.factor)
    if known.kind == "scale":
        said = f"{whose} {when} is {known.factor:.4g} times the declared one in update {step}"
        kind = "gradient sign" if known.factor < 0 else "gradient scale"
        return AuditFinding(kind, place, step, said, evidence, factor=known.factor)
    return AuditFinding("gradient", place, step, f"{whose} {when} is not the declared one in update {step}", evidence)


def _rounded(one: Relation) -> tuple[str, float]:
    return one.kind, 0.0 if one.kind != "scale" else round(one.factor, 3)


def _first_other(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> str:
    """Return the name of the first module, in the order of calls, whose output differs; "" if all are equal. Modules
    that only one side called are left out: a loop may call a part of the model where ``loss_fn`` calls the whole."""
    shared = {*recorded["names"]} & {*replayed["names"]}
    mine, theirs = (
        [pair for pair in zip(each["names"], each["digests"].tolist(), strict=True) if pair[0] in shared]
        for each in (recorded, replayed)
    )
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return one[0]
    if len(mine) != len(theirs):
        return (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))][0]
    return ""


def _without_doubles(found: Sequence[AuditFinding]) -> list[AuditFinding]:
    """Leave out what another finding of the same update says better: tensors that part because moments were dropped,
    and parameters that have no gradient because they were frozen."""
    resets = {one.step for one in found if one.kind == "optimizer reset"}
    return [
        one
        for one in found
        if not (
            one.kind in ("state written", "unexplained", "update")
            and any(at - 1 <= one.step <= at + 1 for at in resets)
        )
    ]


def _dated(found: Sequence[AuditFinding]) -> list[AuditFinding]:
    """Join what parted between two looks with the kind that the next look found: such a fault lasted, and began there.

    The step of an unexplained finding is the first update that began or went on otherwise: a forward pass that differs
    did so there, gradients and updates did so one update before.
    """
    dated: list[AuditFinding] = []
    ordered = sorted(found, key=lambda one: one.step)
    for one in ordered:
        before = dated[-1] if dated else None
        if before is not None and before.kind == "unexplained" and one.kind in LASTING:
            first = before.step if one.kind in ("forward", "loss") else before.step - 1
            parted = f"the replay parted at update {before.step}, so that it began by update {first}"
            dated[-1] = replace(one.with_evidence(parted), step=first)
        else:
            dated.append(one)
    return dated
