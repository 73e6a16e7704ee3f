"""The explanation of a run: audit, judge, derivatives and interventions, and the sentences for their findings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from ..errors import InputError, UsageError, listed
from ..probes.parameters.processes import ALONE
from ..probes.parameters.spreading import spread_out
from ..store import Run
from . import black_box
from .audit import MOST, Auditor, AuditResult
from .derivatives import derivative_findings
from .facts import fact_findings
from .findings import AuditFinding, first_of_each
from .flight import LAST, LEAST, Flight, Level
from .harm import Progress, unheard, window_of
from .interventions import InterventionRecord, intervene
from .judge import Judge
from .recorder import Loss, Recorder
from .replay import DeclaredLoop
from .replicas import agreed, averaging, on_each

Verdict = Literal["cause", "finding", "no cause found", "no lasting harm", "no trouble", "not replayed"]
EXIT_CODES: dict[Verdict, int] = {
    "cause": 1, "finding": 1, "no cause found": 1, "no lasting harm": 0, "no trouble": 0, "not replayed": 1,
}  # fmt: skip
HARMLESS: tuple[Verdict, ...] = ("no lasting harm", "no trouble")


@dataclass(frozen=True)
class Divergence:
    """The divergence of the run at ``path``, by the run's own verdict: its ``step`` and the ``reason``."""

    path: Path
    step: int
    reason: str

    @classmethod
    def of(cls, run: Run) -> Divergence | None:
        """Return the divergence of a run that has ended; None if it did not diverge, or has no verdict."""
        with suppress(InputError):
            if (judged := run.verdict) is not None and judged.state == "diverged":
                return cls(run.path, judged.step, judged.reason)
        return None

    def is_unseen(self, flight: Flight) -> bool:
        """Return True if the recorder had no level of the loss at the divergence, and saw no trouble there.

        A loss that is not finite needs no level: its trouble is the divergence itself.
        """
        if self.step >= flight.levelled or flight.trouble is None:
            return self.step < flight.levelled
        step = int(flight.trouble["step"])
        return step > self.step + 1 and math.isfinite(dict(flight.losses).get(step, math.nan))


@dataclass
class Explanation:
    """The result of :func:`explain`; ``print`` shows it.

    - ``verdict``: "cause" (an intervention or the declared replay decided), "finding" (the audit decided, and nothing
      else was asked), "no cause found", "no lasting harm", "no trouble", or "not replayed" (there are facts of the
      ledger alone). If the run's own verdict is ``diverged``, it is never "no lasting harm" or "no trouble".
    - ``sentences``: the result, then the evidence, then advice.
    - ``findings``: all findings of the audit, the judge and the derivatives, by step.
    - ``audit``, ``experiment``: the results of the audit and of the interventions; None if there were none.
    - ``unchecked``: each check that was not made, with the reason.
    - ``trouble``: the trouble that was recorded; None without any.
    - ``updates``: the number of replayed updates, which is the cost.
    """

    verdict: Verdict
    sentences: list[str]
    findings: list[AuditFinding] = field(default_factory=list)
    audit: AuditResult | None = None
    experiment: InterventionRecord | None = None
    unchecked: list[str] = field(default_factory=list)
    trouble: dict[str, Any] | None = None
    updates: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code of ``stabilitylab explain``: 0 without a finding, lasting harm or divergence, 1 with one."""
        return 1 if any(one.accused for one in self.findings) else EXIT_CODES[self.verdict]

    @property
    def cause(self) -> str:
        """The name of the cause that an intervention confirmed, such as "learning rate at step 130 (x30)"; "" if none
        did. A cause that the declared replay confirmed is the first accused finding."""
        causes = [] if self.experiment is None else self.experiment.causes
        return causes[0].intervention.cause if causes else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "cause": self.cause,
            "sentences": self.sentences,
            "trouble": self.trouble,
            "findings": [one.as_dict() for one in self.findings],
            "audit": self.audit and self.audit.as_dict(),
            "interventions": self.experiment and self.experiment.as_dict(),
            "unchecked": self.unchecked,
            "updates": self.updates,
        }

    def __str__(self) -> str:
        lines = [*self.sentences]
        lines += [str(one) for one in self.findings]
        if self.audit is not None:
            told = (
                f"Audit: {self.audit.equal} of {self.audit.replayed} replayed updates are equal to the recorded ones "
                f"in every bit that was kept ({self.audit.full} of them with sketches of gradients and outputs)"
            )
            if self.audit.between:
                told += f"; but the state before step {self.audit.between[0]} is not the one that they lead to"
            lines.append(f"{told}.")
        lines += [f"Not checked: {why.rstrip('.')}." for why in self.unchecked]
        if self.updates:
            lines.append(f"Cost: {self.updates} updates were replayed.")
        return "\n".join(lines)


def explain(
    run: str | Path | Run | Recorder,
    model: nn.Module | None = None,
    loss_fn: Loss | None = None,
    optimizer: Any = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    clip: Any = None,
    audit: bool = False,
    updates: int = MOST,
    progress: Progress = unheard,
) -> Explanation:
    """Explain the failure of a recorded run: replay its last updates, and test each suspect by an intervention.

    - ``run``: a run directory with a black box, or the :class:`stabilitylab.Recorder` of this process.
    - ``model``, ``loss_fn``, ``optimizer``: objects of the kind that was recorded, in any state; their state does not
      change. Without them, the result has only the facts of the ledger.
    - ``scaler``, ``scheduler``, ``clip``: as they were given to the recorder, if they were.
    - ``audit``: True to replay and check only, without interventions.
    - ``updates``: the largest number of updates that the audit replays.
    - ``progress``: a function that gets a sentence at the start of each part, with its cost, and one at the start of
      each intervention.

    A run of several processes (DistributedDataParallel) is explained by as many processes. Call this on each of them,
    with the wrapped model: all replay together, and all return the same result.

    Raises InputError for a run without a black box, UsageError for objects that do not fit the run.
    """
    given = run if isinstance(run, Recorder) else None
    flight, divergence = _flight(run, model)
    if given is not None:
        loss_fn = loss_fn or given.loss_fn
    if model is None or optimizer is None or loss_fn is None:
        if model is not None or optimizer is not None:
            raise UsageError("explain needs model, loss_fn and optimizer together: give all three, or none of them.")
        return _facts_alone(flight, divergence)
    loop = DeclaredLoop.of(flight, model, optimizer, loss_fn, given, scaler=scaler, scheduler=scheduler, clip=clip)
    flight = agreed(flight, loop.processes)
    auditor = Auditor(flight, loop, updates)
    progress(f"replaying the {auditor.count} recorded updates that follow a snapshot")
    began = time.monotonic()
    result = auditor.run()
    seconds = (time.monotonic() - began) / max(1, result.replayed + result.tried)
    data, unjudged = Judge(flight, loop).findings()
    slopes, unmeasured = derivative_findings(flight, loop)
    findings = first_of_each([*result.findings, *data, *slopes])
    found = Explanation(
        verdict="no trouble",
        sentences=[_told(flight, divergence)],
        findings=findings,
        audit=result,
        unchecked=[*result.unchecked, *unjudged, *unmeasured, *flight.notes],
        trouble=flight.trouble,
        updates=result.replayed + result.tried,
    )
    accused = [one for one in findings if one.accused]
    if audit or flight.trouble is None:
        _judge_audit(found, flight, accused, audit)
    elif not flight.lasting():
        _no_harm(found)
    else:
        _intervene(found, flight, loop, accused, seconds, progress)
    if divergence is not None:
        _beside(found, flight, divergence)
    return found


def _flight(run: str | Path | Run | Recorder, model: nn.Module | None) -> tuple[Flight, Divergence | None]:
    """Return the flight that this process recorded (each of several has its own), and the run's divergence."""
    processes = ALONE if model is None or averaging(model) is None else spread_out(model)
    return on_each(processes, lambda: _own_flight(run, processes.rank))


def _own_flight(run: str | Path | Run | Recorder, rank: int) -> tuple[Flight, Divergence | None]:
    if isinstance(run, Recorder):
        if run.flight is None or not run.flight.updates:
            raise InputError(
                "this recorder has recorded nothing: give it to watch(record=...), and loop over w.batches."
            )
        return run.flight, None
    opened = run if isinstance(run, Run) else Run.open(run)
    if not black_box.found(opened.path):
        if why := opened.manifest.get("not_replayable"):
            raise InputError(f"{opened.path} cannot be replayed: {why}.")
        if opened.kind == "train":
            raise InputError(f"{opened.path} has no black box: make the run again with 'stabilitylab probe --record'.")
    return black_box.chosen(opened.path, opened.identity, rank), Divergence.of(opened)


def _facts_alone(flight: Flight, divergence: Divergence | None) -> Explanation:
    findings = first_of_each(fact_findings(flight))
    accused = [one for one in findings if one.accused]
    told = _told(flight, divergence)
    head = (
        f"{told} The ledger has {len(accused)} finding{'s' * (len(accused) > 1)}."
        if accused
        else f"{told} The ledger has no finding."
    )
    why = "nothing was replayed: give --factory PACKAGE.MODULE:FUNCTION, or model, loss_fn and optimizer"
    verdict: Verdict = "finding" if accused else _of_trouble(flight, "not replayed")
    found = Explanation(verdict=verdict, sentences=[head], findings=findings, unchecked=[why], trouble=flight.trouble)
    if divergence is not None:
        _beside(found, flight, divergence)
    return found


def _of_trouble(flight: Flight, lasting: Verdict) -> Verdict:
    """Return the verdict of a run without a finding; ``lasting``: that of a trouble that lasted."""
    if flight.trouble is None:
        return "no trouble"
    return lasting if flight.lasting() else "no lasting harm"


def _told(flight: Flight, divergence: Divergence | None) -> str:
    """Say in words what the recorder saw, and first a divergence that it did not see."""
    if divergence is not None and (flight.trouble is None or divergence.is_unseen(flight)):
        unseen = f"The run's verdict is `diverged`: {divergence.reason}. The recorder did not see the divergence"
        unseen += f": {_no_level(flight)}." if divergence.is_unseen(flight) else "."
        return unseen if flight.trouble is None else f"{unseen} {_trouble(flight)}"
    if flight.trouble is not None:
        return _trouble(flight)
    told = f"No trouble was recorded up to step {flight.last}"
    first, last = flight.losses[:1], [loss for _, loss in flight.losses][-LAST:]
    if not first or not flight.levelled or not Level(first[0][1], 0.0).left_by(end := float(np.median(last))):
        return f"{told}."
    return (
        f"{told}, but {_no_level(flight)}. The loss rose from {_number(first[0][1])} at step {first[0][0]} to "
        f"{_number(end)}, the median of the last {len(last)}."
    )


def _no_level(flight: Flight) -> str:
    if math.isfinite(flight.levelled):
        return f"no level of the loss was known before step {flight.levelled}"
    return f"no level of the loss was known (it takes {LEAST} finite losses)"


def _trouble(flight: Flight) -> str:
    assert flight.trouble is not None, "there is a trouble"
    last = [loss for _, loss in flight.losses][-LAST:]
    return (
        f"Trouble at step {flight.trouble['step']}: {flight.trouble['why']}. The median of the last {len(last)} "
        f"recorded losses is {_number(float(np.median(last)))}."
    )


def _judge_audit(found: Explanation, flight: Flight, accused: Sequence[AuditFinding], audit: bool) -> None:
    assert found.audit is not None, "an audit was made"
    found.verdict = "finding" if accused else _of_trouble(flight, "no cause found")
    if accused:
        told = f"The audit has {len(accused)} finding{'s' * (len(accused) > 1)}; first: {accused[0].sentence}."
    elif found.audit.is_equal:
        told = f"The loop does what it declares: all {found.audit.replayed} replayed updates are equal."
    else:
        told = "No fault was found: the replay differs only by things that were not declared."
    found.sentences = [f"{found.sentences[0]} {told}"]
    if audit and flight.trouble is not None:
        found.unchecked.append("interventions: leave --audit out to try them")


def _no_harm(found: Explanation) -> None:
    found.verdict = "no lasting harm"
    found.sentences = [f"{found.sentences[0]} Trouble without lasting harm: no intervention was tried."]


def _beside(found: Explanation, flight: Flight, divergence: Divergence) -> None:
    """Bring the verdict and its sentences in line with a run that diverged: it has neither no trouble nor no harm."""
    advice = f"`stabilitylab diagnose {divergence.path}` lists the events in their order and says what to do."
    is_harmless = found.verdict in HARMLESS
    if is_harmless:
        found.verdict = "no cause found"
    if flight.trouble is None:
        none = "No cause found: no" if is_harmless else "No"
        found.sentences.append(
            f"{none} intervention was tried, since each needs a trouble that the recorder saw. {advice}"
        )
    elif divergence.is_unseen(flight):
        found.sentences.append(
            f"These results are about step {flight.trouble['step']}. They do not explain the divergence at step "
            f"{divergence.step}: {advice}"
        )
    elif is_harmless:
        found.sentences.append(f"But the run's verdict is `diverged`: {divergence.reason}. {advice}")


def _intervene(
    found: Explanation,
    flight: Flight,
    loop: DeclaredLoop,
    accused: Sequence[AuditFinding],
    seconds: float,
    progress: Progress,
) -> None:
    """Try interventions, and write the verdict and its sentences. ``seconds``: the time of one update of the audit."""
    assert found.audit is not None, "an audit was made"
    window = window_of(flight, [one.step for one in accused])
    if window is None:
        found.verdict = "finding" if accused else "no cause found"
        found.unchecked.append("interventions: no snapshot before the trouble is left; record with a smaller every=")
        if not accused:
            found.sentences += _no_cause(0, ["everything"])
        return
    length = window.stop - window.start
    progress(
        f"trying interventions: each, and each repeat of an intervention that heals, replays {length} updates, about "
        f"{seconds * length:.1f} s"
    )
    tried = found.experiment = intervene(flight, loop, window, found.findings, progress)
    found.updates += tried.updates
    (head,) = found.sentences
    if not tried.repeatable:
        head += " Replays on this device are not equal in their bits: bands of repeated replays were used."
    if not tried.harmed:
        found.verdict, found.sentences = _by_declaration(found, tried, accused, head)
    elif tried.causes:
        found.verdict = "cause"
        found.sentences = [head, *_cause(tried)]
    else:
        found.verdict = "no cause found"
        found.sentences = [head, *_nothing(tried)]


def _by_declaration(
    found: Explanation, tried: InterventionRecord, accused: Sequence[AuditFinding], head: str
) -> tuple[Verdict, list[str]]:
    """Return the verdict and its sentences if the declared replay does no harm: the recorded loop is not the declared
    one."""
    replayed = [one for one in accused if one.step <= tried.window.trouble]
    level = f"the score on healthy batches stays at {tried.plain:.4g} (healthy: {tried.healthy.score:.4g})"
    repeats = f"{sum(not tried.healthy.is_harmed(s) for s in tried.declared_repeats)} of {len(tried.declared_repeats)}"
    assert found.audit is not None, "an audit was made"
    if found.audit.is_equal:
        return "no lasting harm", [head, f"Trouble without lasting harm: {level}."]
    if not tried.declared_heals:
        return ("finding" if accused else "no cause found"), [
            head, f"The declared updates heal in only {repeats} repeats with noise: no cause is named.",
        ]  # fmt: skip
    if not replayed:
        told = f"The declared updates alone heal ({repeats} repeats), but the cause of the difference is not known."
        return "no cause found", [head, told]
    first = replayed[0]
    return "cause", [
        head,
        f"Cause: {first.sentence}. Evidence: with the declared updates {level}, in {repeats} repeats with noise. "
        f"Remedy: {first.remedy}.",
    ]


def _cause(tried: InterventionRecord) -> list[str]:
    first, *others = tried.causes
    own = first.intervention
    healed, total = len(first.repeats) + len(first.confirmed), len(tried.controls)
    reached = sum(not tried.healthy.is_harmed(score) for _, score in tried.controls)
    evidence = (
        f"with {own.with_it} the score on healthy batches stays at {first.score:.4g} "
        f"(healthy: {tried.healthy.score:.4g}; {healed} of {healed} repeats); without, it is {_number(tried.plain)}; "
        f"no control heals ({reached} of {total})"
    )
    remedy = own.finding.remedy if own.finding is not None else "undo it, or take one of the remedies below"
    lines = [f"Cause: {own.cause}. Evidence: {evidence}. Remedy: {remedy}."]
    if others:
        lines.append(f"These heal as well: {listed([one.intervention.name for one in others])}.")
    lines += [f"A remedy, not a cause: {one.intervention.with_it} heals too." for one in tried.remedies]
    return lines


def _nothing(tried: InterventionRecord) -> list[str]:
    if tried.chaotic:
        name = next(name for name, score in tried.controls if not tried.healthy.is_harmed(score))
        return [
            f"No cause found: a benign change ({name}) heals as well, so that no intervention counts. "
            f"Not tried: {'; '.join(tried.not_tried)}."
        ]
    lines = _no_cause(len(tried.trials), tried.not_tried)
    lines += [f"Place: with {one.intervention.with_it} the trouble does not come." for one in tried.places]
    lines += [f"A remedy, not a cause: {one.intervention.with_it} heals." for one in tried.remedies]
    return lines


def _no_cause(count: int, not_tried: Sequence[str]) -> list[str]:
    return [f"No cause found among {count} interventions. Not tried: {'; '.join(not_tried)}."]


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
