"""Interventions: replays with one thing changed, of which one that heals is a cause, if chaos cannot have done it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from ..probes.numerics import attention
from ..probes.places.naming import parameters_of
from .batches import changed
from .derivatives import groups_of
from .findings import AuditFinding
from .flight import Flight
from .harm import Bench, Healthy, Progress, Window, unheard
from .judge import roller, updates_in_words
from .replay import DeclaredLoop, ReplayChange, Settings
from .states import restore_moments

NOISE = 1e-4  # of each tensor's root mean square: a benign change, far above rounding
REPEATS = 3  # jittered repeats that an intervention must heal in, and as many new ones for the winner
JITTER, CONFIRM, BENIGN = 11, 101, 1001  # seeds of the noise: of repeats, of confirming repeats, of controls

Role = Literal["cause", "remedy", "place"]


@dataclass(frozen=True)
class Intervention:
    """One thing that is changed in a replay. ``with_it``: the words after "with"; ``cause``: the name of the cause that
    it is evidence for."""

    name: str
    role: Role
    with_it: str
    cause: str
    change: ReplayChange
    step: int
    finding: AuditFinding | None = None


@dataclass
class Trial:
    """An intervention as it was tried: ``score`` without noise, and the scores of its repeats."""

    intervention: Intervention
    score: float
    repeats: list[float] = field(default_factory=list)
    confirmed: list[float] = field(default_factory=list)
    healed: bool = False

    def as_dict(self) -> dict[str, Any]:
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "intervention"}
        tried = self.intervention
        return {"name": tried.name, "role": tried.role, "step": tried.step, **own}


@dataclass
class InterventionRecord:
    """The outcome of all interventions in one window. ``plain``: the score of the declared replay; ``controls``: the
    names and scores of benign changes; ``chaotic``: a control reached the healthy level, so that no intervention
    counts. ``repeatable``: two plain replays had equal scores."""

    window: Window
    healthy: Healthy
    plain: float
    harmed: bool
    declared_heals: bool = False
    repeatable: bool = True
    controls: list[tuple[str, float]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    updates: int = 0
    declared_repeats: list[float] = field(default_factory=list)

    @property
    def chaotic(self) -> bool:
        return any(not self.healthy.is_harmed(score) for _, score in self.controls)

    @property
    def causes(self) -> list[Trial]:
        return self._healed("cause")

    @property
    def remedies(self) -> list[Trial]:
        return self._healed("remedy")

    @property
    def places(self) -> list[Trial]:
        return self._healed("place")

    def _healed(self, role: Role) -> list[Trial]:
        return [one for one in self.trials if one.healed and one.intervention.role == role]

    def as_dict(self) -> dict[str, Any]:
        window = self.window
        return {
            **{"start": window.start, "onset": window.onset, "stop": window.stop},
            **{"healthy": self.healthy.score, "margin": self.healthy.margin, "plain": self.plain},
            **{"repeatable": self.repeatable, "controls": dict(self.controls)},
            **{"trials": [one.as_dict() for one in self.trials], "not_tried": self.not_tried},
        }


def intervene(
    flight: Flight,
    loop: DeclaredLoop,
    window: Window,
    findings: Sequence[AuditFinding],
    progress: Progress = unheard,
) -> InterventionRecord:
    """Try interventions on the flight's trouble.

    The declared replay comes first. If it has no harm while the recorded run had, what was recorded is not what was
    declared, and no further intervention is needed. Else at least four benign controls must all be harmed; an
    intervention counts if it heals without noise and in three of three repeats with noise, and the winner again in
    three new ones. Interventions on causes are tried first, remedies last. The loop's objects are left as they were.
    """
    with loop.kept():
        bench = Bench(flight, loop, window, progress)
        healthy, plain = bench.healthy(), bench.score_after()
        again = bench.score_after()
        found = InterventionRecord(
            window, healthy, plain, harmed=healthy.is_harmed(plain), repeatable=_same(plain, again)
        )
        if not found.repeatable:
            healthy.margin += 3 * abs(plain - again) if math.isfinite(plain - again) else 0.0
            found.harmed = healthy.is_harmed(plain)
        if not found.harmed:
            found.declared_repeats = [bench.score_after(noise(JITTER + n)) for n in range(2 * REPEATS)]
            found.declared_heals = not any(map(healthy.is_harmed, found.declared_repeats))
            found.updates = bench.updates
            return found
        found.controls = [(name, bench.score_after(change)) for name, change in controls(flight, window)]
        listed = [*interventions(flight, window, findings)]
        if not found.chaotic:
            _try_all(bench, found, [one for one in listed if one.role == "cause"])
            _try_all(bench, found, [one for one in listed if one.role == "remedy"])
            if not found.causes:
                _bisect(bench, found)
        else:
            found.not_tried += [one.name for one in listed]
        found.not_tried += _untried(flight)
        found.updates = bench.updates
        return found


def controls(flight: Flight, window: Window) -> Iterator[tuple[str, ReplayChange]]:
    """Yield benign changes: noise of 1e-4 in the weights, twice; two batches that change places; attention's other
    kernel, with noise a tenth as large, since a model may have no attention."""
    yield "noise of 1e-4 in the weights", noise(BENIGN)
    yield "other noise of 1e-4 in the weights", noise(BENIGN + 1)
    first, second = _swapped(flight, window)
    yield f"batches of updates {first} and {second} swapped", swap(flight, first, second)
    math_kernel = ReplayChange(around=lambda: attention(["math"]))
    yield "attention by torch's math kernel, noise of 1e-5", combined(noise(BENIGN + 2, NOISE / 10), math_kernel)


def interventions(flight: Flight, window: Window, findings: Sequence[AuditFinding]) -> Iterator[Intervention]:
    """Yield the interventions of a window, those on causes first."""
    yielded: set[tuple[str, int]] = set()
    for finding in findings:
        if finding.step > window.trouble or finding.step < window.start:
            continue
        one = _of_finding(flight, finding)
        if one is not None and (one.name, one.step) not in yielded:
            yielded.add((one.name, one.step))
            yield one
    trouble, onset = window.trouble, window.onset
    of_data = [one for one in findings if one.kind in ("bad batch", "labels", "mask")]
    bad = {step for one in of_data for step in range(one.step, one.last + 1)}
    for step in (trouble, trouble - 1):
        if step not in bad and step > window.start:
            yield _batch_replaced(flight, step, step, None)
    yield Intervention(
        "moments of the snapshot",
        "cause",
        f"the moments that the optimizer had at step {window.start}",
        f"the optimizer's moments at step {onset}",
        ReplayChange(begin=_moments(flight, window.start, onset)),
        onset,
    )
    for share, word in ((0.5, "half"), (0.1, "a tenth of")):
        yield Intervention(
            f"{word} the rate",
            "remedy",
            f"{word} the learning rate from step {onset} on",
            "",
            _rated(onset, share),
            onset,
        )
    if (norm := _usual_norm(flight, onset)) is not None:
        yield Intervention(
            "clipping",
            "remedy",
            f"gradients clipped to a norm of {norm:.3g} from step {onset} on",
            "",
            ReplayChange(gradients=_clipped(onset, norm)),
            onset,
        )


def noise(seed: int, size: float = NOISE) -> ReplayChange:
    """Return a change that adds noise to the weights of the snapshot: ``size`` times each tensor's root mean square."""

    def start(loop: DeclaredLoop) -> None:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in parameters_of(loop.model).values():
                step = torch.randn(parameter.shape, generator=draw, dtype=torch.float32).to(parameter)
                parameter.add_(step * size * parameter.square().mean().sqrt())

    return ReplayChange(start=start)


def swap(flight: Flight, first: int, second: int) -> ReplayChange:
    """Return a change in which the batches of two updates change places."""
    one, other = flight.updates[first].batches, flight.updates[second].batches
    places = {**dict(zip(one, other, strict=False)), **dict(zip(other, one, strict=False))}
    return ReplayChange(batch=lambda step, number, batch: flight.batches[places.get(number, number)])


def combined(*changes: ReplayChange) -> ReplayChange:
    """Return a change that does all of ``changes``, in order."""

    def start(loop: DeclaredLoop) -> None:
        for one in changes:
            one.start(loop)

    def settings(step: int, recorded: Settings) -> Settings:
        for one in changes:
            recorded = one.settings(step, recorded)
        return recorded

    def batch(step: int, number: int, held: dict[str, Any]) -> dict[str, Any]:
        for one in changes:
            held = one.batch(step, number, held)
        return held

    def gradients(step: int, loop: DeclaredLoop) -> None:
        for one in changes:
            one.gradients(step, loop)

    def begin(step: int, loop: DeclaredLoop) -> None:
        for one in changes:
            one.begin(step, loop)

    around = changes[-1].around
    return ReplayChange(
        start, lambda fact: all(one.facts(fact) for one in changes), settings, batch, gradients, begin, around
    )


def _try_all(bench: Bench, found: InterventionRecord, listed: Sequence[Intervention]) -> None:
    """Try each once; those that heal again with noise, and the winners in new repeats."""
    for one in listed:
        bench.progress(f"intervention: {one.name}")
        trial = Trial(one, bench.score_after(one.change))
        found.trials.append(trial)
        if found.healthy.is_harmed(trial.score):
            continue
        trial.repeats = _repeated(bench, found.healthy, one.change, JITTER)
        if any(map(found.healthy.is_harmed, trial.repeats)):
            continue
        trial.confirmed = _repeated(bench, found.healthy, one.change, CONFIRM)
        trial.healed = not any(map(found.healthy.is_harmed, trial.confirmed))
        if trial.healed and one.role == "remedy":
            return  # the mildest remedy that heals is enough


def _repeated(bench: Bench, healthy: Healthy, change: ReplayChange, seed: int) -> list[float]:
    scores: list[float] = []
    for number in range(REPEATS):
        scores.append(bench.score_after(combined(noise(seed + number), change)))
        if healthy.is_harmed(scores[-1]):
            break
    return scores


def _bisect(bench: Bench, found: InterventionRecord) -> None:
    """Freeze half of the layers from the onset on, then half of the half that heals, and so on: the place of a trouble
    without a known cause. Freezing all of them heals of course, and says nothing."""
    groups = groups_of(list(parameters_of(bench.loop.model)))
    names, onset = list(groups), found.window.onset
    place: Trial | None = None
    while len(names) > 1:
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        for half in halves:
            frozen = frozenset(name for group in half for name in groups[group])
            what = half[0] if len(half) == 1 else f"{half[0]} to {half[-1]}"
            one = Intervention(
                f"{what} frozen", "place", f"{what} frozen from step {onset} on", what,
                ReplayChange(gradients=_frozen(onset, frozen)), onset,
            )  # fmt: skip
            before = len(found.trials)
            _try_all(bench, found, [one])
            if found.trials[before].healed:
                place, names = found.trials[before], list(half)
                break
        else:
            break
    for trial in found.trials:
        if trial.intervention.role == "place" and trial is not place:
            trial.healed = False  # the smallest place is told


def _of_finding(flight: Flight, finding: AuditFinding) -> Intervention | None:
    """Return the intervention that undoes what a finding names; None if the declared replay does not contain it."""
    step = finding.step
    if finding.kind in ("rate", "setting"):
        key = "lr" if finding.kind == "rate" else finding.place.rpartition(" ")[2]
        group = finding.place if finding.kind == "rate" else finding.place.rpartition(" ")[0]
        fact = next(f for f in flight.heard if f["step"] == step and f["name"] == f"{group} {key}")
        word = "learning rate" if key == "lr" else key
        size = f" (x{finding.factor:.3g})" if finding.factor else f" ({fact['before']} to {fact['after']})"
        return Intervention(
            f"{word} as before", "cause", f"the {word} of step {step - 1}", f"{word} at step {step}{size}",
            ReplayChange(settings=_held(group, key, fact["before"], step)), step, finding,
        )  # fmt: skip
    if finding.kind in ("mode", "frozen", "attribute"):
        names = {f["name"] for f in flight.heard if f["step"] == step and f["kind"] in ("flag", "attribute")}
        what = {"mode": "training mode", "frozen": "gradients as before", "attribute": f"{finding.place} as before"}
        cause = {"mode": f"eval mode of {finding.place}", "frozen": f"{finding.place} frozen"}.get(
            finding.kind, f"another {finding.place}"
        )
        return Intervention(
            what[finding.kind], "cause", f"{what[finding.kind]} from step {step} on", f"{cause} at step {step}",
            ReplayChange(facts=lambda fact: not (fact["step"] == step and fact["name"] in names)), step, finding,
        )  # fmt: skip
    if finding.kind == "labels" and finding.factor:
        last, by = finding.last, -int(finding.factor)
        where = f"updates {step} to {last}"
        change = _rolled(flight, step, last, by)
        return Intervention(
            "labels rolled back",
            "cause",
            f"the labels of {where} rolled back",
            f"shifted labels in {where}",
            change,
            step,
            finding,
        )
    if finding.kind in ("bad batch", "mask"):
        return _batch_replaced(flight, step, finding.last, finding)
    return None


def _batch_replaced(flight: Flight, first: int, last: int, finding: AuditFinding | None) -> Intervention:
    """Replace the batches of updates by those of the updates before them."""
    length = last - first + 1
    places: dict[int, int] = {}
    for step in range(first, last + 1):
        own, earlier = flight.updates.get(step), flight.updates.get(step - length) or flight.updates.get(first - 1)
        if own is not None and earlier is not None:  # an update that came without w.batch() is not there
            theirs = earlier.batches
            places |= {number: theirs[at % len(theirs)] for at, number in enumerate(own.batches)}
    where = updates_in_words(first, last)
    return Intervention(
        f"the data of {where} replaced", "cause", f"the data of {where} replaced by earlier ones",
        f"the data of {where}",
        ReplayChange(batch=lambda step, number, batch: flight.batches[places[number]] if number in places else batch),
        first, finding,
    )  # fmt: skip


def _rolled(flight: Flight, first: int, last: int, by: int) -> ReplayChange:
    change = roller(flight.declared["labels"], by)
    return ReplayChange(batch=lambda step, number, batch: changed(batch, change) if first <= step <= last else batch)


def _held(group: str, key: str, value: Any, since: int) -> Callable[[int, Settings], Settings]:
    """Return settings in which one key of one group keeps its value."""
    _, number, _, at = group.split(" ")

    def settings(step: int, recorded: Settings) -> Settings:
        if step < since:
            return recorded
        own = [[dict(one) for one in groups] for groups in recorded]
        own[int(number)][int(at)][key] = tuple(value) if isinstance(value, list) else value
        return own

    return settings


def _rated(since: int, share: float) -> ReplayChange:
    def settings(step: int, recorded: Settings) -> Settings:
        if step < since:
            return recorded
        return [[{**group, "lr": group["lr"] * share} for group in groups] for groups in recorded]

    return ReplayChange(settings=settings)


def _clipped(since: int, norm: float) -> Callable[[int, DeclaredLoop], None]:
    def act(step: int, loop: DeclaredLoop) -> None:
        if step >= since:
            torch.nn.utils.clip_grad_norm_([*loop.model.parameters()], norm)

    return act


def _frozen(since: int, names: frozenset[str]) -> Callable[[int, DeclaredLoop], None]:
    def act(step: int, loop: DeclaredLoop) -> None:
        if step >= since:
            for name, parameter in parameters_of(loop.model).items():
                if name in names:
                    parameter.grad = None

    return act


def _moments(flight: Flight, start: int, onset: int) -> Callable[[int, DeclaredLoop], None]:
    def act(step: int, loop: DeclaredLoop) -> None:
        if step == onset:
            for kept, one in zip(flight.snapshots[start]["optimizers"], loop.optimizers, strict=True):
                restore_moments(kept, one)

    return act


def _swapped(flight: Flight, window: Window) -> tuple[int, int]:
    """Return two neighbouring updates with recorded batches: the last before the onset, or the first of the window."""
    before = [step for step in range(window.start, window.onset) if step in flight.updates]
    return (before[-2], before[-1]) if len(before) > 1 else (window.start, window.start + 1)


def _usual_norm(flight: Flight, onset: int) -> float | None:
    """Return the median norm of the whole gradient in the sketched updates before the onset; None for none."""
    norms = [
        math.sqrt(float(update.full["gradient"]["numbers"][:, 0].sum()))
        for step, update in flight.updates.items()
        if step < onset and update.full and "gradient" in update.full
    ]
    return sorted(norms)[len(norms) // 2] if norms else None


def _untried(flight: Flight) -> list[str]:
    """Return what is not among the interventions here."""
    half = any(
        one.dtype in (torch.float16, torch.bfloat16) for s in flight.snapshots.values() for one in s["tensors"].values()
    )
    left = ["another seed of dropout", "another order of all batches", "another architecture"]
    return [*left, "float32 instead of half precision"] if half else left


def _same(one: float, other: float) -> bool:
    """Return True for equal scores, and for two of which none is finite."""
    return one == other or not (math.isfinite(one) or math.isfinite(other))
