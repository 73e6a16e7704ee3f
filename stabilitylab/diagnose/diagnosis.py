"""The diagnosis of one run: the findings of all detectors in their order, and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import InputError, StabilityLabError, in_words
from ..registry import BUILT_IN
from ..store import Run
from ..store.layout import BLACK_BOX, checkpoints
from ..store.reader import of_snapshots
from ..verdict import Verdict as RunVerdict
from .announced import announced
from .attribution import Attribution, attribution
from .audited import audited
from .cause import Cause, explain, ordered, sentence, undecided, why_together
from .consequence import weighed
from .events import DETECTORS, LEDGER, Event, as_sentence
from .evidence import Evidence
from .headroom import headroom
from .unmeasured import not_measured, unmeasured

HEALTH = ("loss_spike", "divergence", "plateau")  # detectors that must have run before a run is called healthy
SAID = 4  # places of events that the paragraph names
UNKNOWN = "Cause unknown: `stabilitylab explain` can test it, if the run has `watch(record=sl.Recorder(loss_fn))`."
UNKNOWN_OF_PROBE = "Cause unknown: `stabilitylab explain` can test it, if the run is made again with `probe --record`."
LEVEL = 8  # losses after which the recorder of explain knows their level
UNSEEN = f"Cause unknown: `stabilitylab explain` cannot test it, as its recorder needs {LEVEL} losses before a trouble."
Verdict = Literal["healthy", "open", "warning", "failure"]


@dataclass(frozen=True)
class Diagnosis:
    """The events of a run in their order, and what could not be checked.

    - ``checked``: kind -> the sources that were read.
    - ``unchecked``: kind -> why it was not checked, or not at all steps, and what records its sources; ``unrecorded``:
      those of these kinds of which no source was recorded.
    - ``open``: why it is not known whether the run trains; "" if it is known. The held-out loss does not decide, or
      the loss was not recorded, or it was recorded in too few rows.
    - ``unmeasured``: what the run was to record and did not -> why.
    - ``headroom``: the last distance from the highest stable rate on its fixed batch, in a sentence; "" if not
      recorded.
    - ``attribution``: the shares of groups of parameters in the squared gradient norm, of the first row, of the row of
      the first sign and of the last row; empty if not recorded.
    - ``doubts``: warnings given while it ran, such as a ``step()`` in the wrong place.
    - ``not_neutral``: what watching changed in the model and could not undo. Training then differs from that of an
      unwatched run.
    - ``audit``: what was checked of the model and the loop at the first row, a clause each.
    - ``replayable``: a flight recorder wrote a black box with which ``explain`` can test causes. ``untested``: the
      sentence on an unknown cause of another run.
    """

    run: str
    state: str
    step: int
    reason: str
    events: tuple[Event, ...]
    cause: Cause
    checked: Mapping[str, list[str]]
    unchecked: Mapping[str, str]
    open: str = ""
    unrecorded: tuple[str, ...] = ()
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    headroom: str = ""
    attribution: tuple[Attribution, ...] = ()
    doubts: tuple[str, ...] = ()
    not_neutral: tuple[str, ...] = ()
    audit: tuple[str, ...] = ()
    replayable: bool = False
    untested: str = UNKNOWN

    def __str__(self) -> str:
        return self.paragraph

    @property
    def verdict(self) -> Verdict:
        severities = {event.severity for event in self.events}
        if severities & {"failure", "warning"}:
            return "failure" if "failure" in severities else "warning"
        return "open" if self.untold else "healthy"

    @property
    def untold(self) -> list[str]:
        """The reasons why a run without findings is not called healthy."""
        told = [f"it is not known whether the run trains: {self.open}"] if self.open else []
        told += self.pending
        told += [f"the numbers do not say why the run {self.state}"] if self.state in ("failed", "diverged") else []
        told += ["the recorded numbers may not be those of the updates"] if self.doubts else []
        return told + (["watching changed the training"] if self.not_neutral else [])

    @property
    def pending(self) -> list[str]:
        """Clauses on what may still come of events that last to the end of the run, each once."""
        return list(dict.fromkeys(event.open for event in self.events if event.open))

    @property
    def layers(self) -> list[str]:
        """The places that the events of the chain name, in the order of the chain."""
        return list(dict.fromkeys(event.where for event in self.cause.chain if event.place is not None))

    @property
    def paragraph(self) -> str:
        """The finding in plain words."""
        told = f"{self.open} {self._first if self.cause.first else ''}".lower()
        reason = f": {self.reason}" if self.reason and self.reason.lower() not in told else ""
        ended = f"{self.state} at step {self.step}{reason}"
        if self.cause.first is None:
            return " ".join([self._nothing_found(ended), *self._last_words()])
        words = [f"{self.run} {self._outcome} ({ended}). {self._first}."]
        if len(self.cause.chain) > 1:
            words.append(f"Order of events: {sentence(self.cause)}.")
        if places := [f"{event.title} in {event.where}" for event in self.cause.chain if event.place is not None]:
            more = f"; and {len(places) - SAID} more" if len(places) > SAID else ""
            words.append(f"Where: {'; '.join(places[:SAID])}{more}.")
        if self.unknown:
            words.append(self.unknown)
        if self.remedies:
            words.append(f"What to do: {' '.join(self.remedies)}")
        apart = Cause(self.cause.chain, tuple(r for r in self.cause.rivals if r not in self.cause.together))
        words += [as_sentence(text) for text in undecided(apart)]
        return " ".join([*words, *self._last_words()])

    def _nothing_found(self, ended: str) -> str:
        """The paragraph of a run without findings, up to its last words."""
        if not self.checked:
            return f"{self.run} ({ended}): nothing was recorded that can be checked."
        noted = {event.kind: event for event in reversed(self.events)}.values()
        notes = "".join(f" Note: {event.evidence.rstrip('.')}." for event in noted)
        harm = " that did harm" if notes and not self.pending else ""
        nothing = f"none of {len(self.checked)} kind{'s' * (len(self.checked) != 1)} of trouble was found{harm}"
        if self.untold:
            return f"{self.run} ({ended}): {nothing}, but {', and '.join(self.untold)}.{notes}"
        return f"{self.run} is healthy ({ended}): {nothing}.{notes}"

    @property
    def remedies(self) -> list[str]:
        """The advice for the events that came first, a sentence or two each."""
        return list(dict.fromkeys(event.remedy for event in self.cause.together))

    @property
    def unknown(self) -> str:
        """A sentence if something is wrong and none of the events that came first names a cause; else ""."""
        if self.cause.first is None or any(event.names_cause for event in self.cause.together):
            return ""
        return f"Cause unknown: `stabilitylab explain {self.run}` can test it." if self.replayable else self.untested

    def _last_words(self) -> list[str]:
        room = as_sentence(self.headroom) if self.headroom else ""
        doubts = f"Warned as it ran: {'; '.join(self.doubts)}." if self.doubts else ""
        changed = f"Not neutral: {'; '.join(self.not_neutral)}." if self.not_neutral else ""
        return [*filter(None, (room, doubts, changed, not_measured(self.unmeasured)))]

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "step": self.step,
            "reason": self.reason,
            "verdict": self.verdict,
            "paragraph": self.paragraph,
            "chain": [event.kind for event in self.cause.chain],
            "first": [event.kind for event in self.cause.together],
            "cause": "unknown" if self.unknown else [event.kind for event in self.cause.together if event.names_cause],
            "undecided": undecided(self.cause),
            "remedies": self.remedies,
            "layers": self.layers,
            "open": self.untold,
            "events": [event.as_dict() for event in self.events],
            "checked": dict(self.checked),
            "unchecked": dict(self.unchecked),
            "unmeasured": dict(self.unmeasured),
            "headroom": self.headroom,
            "gradient_shares": [one.as_dict() for one in self.attribution],
            "doubts": list(self.doubts),
            "not_neutral": list(self.not_neutral),
            "audit": list(self.audit),
        }

    @property
    def _outcome(self) -> str:
        """The outcome of the run as a predicate: ``has failed: divergence at step 43``, or ``has 2 warnings``."""
        failures = [event for event in self.events if event.severity == "failure"]
        if failures:
            first = min(failures, key=lambda event: event.moment)
            return f"has failed: {first.title} at step {first.step}"
        count = len({event.kind for event in self.events if event.severity == "warning"})
        return f"has {count} warning{'s' * (count > 1)}"

    @property
    def _first(self) -> str:
        """The first event in words, such as ``First sign: loss spike. ...``; several events if none of them comes
        first."""
        events = self.cause.together
        notes = any(event.severity == "note" and event.step < events[0].step for event in self.events)
        aside = " (without notes)" if notes else ""
        evidence = " ".join(event.sentence for event in events).rstrip(".")
        if len(events) == 1:
            return f"First sign{aside}: {events[0].title}. {evidence}"
        named = f"{', '.join(event.title for event in events[:-1])} and {events[-1].title}"
        return f"First signs{aside}, together at step {events[0].step}: {named} ({why_together(*events)}). {evidence}"


def diagnose(run: Run) -> Diagnosis:
    """Diagnose a run directory of ``stabilitylab probe`` or ``watch``: finished, broken or still going.

    Each detector in :mod:`stabilitylab.diagnose.detectors` has its thresholds beside its rule; all of them read one
    snapshot of the run. Raises InputError if nothing is recorded.
    """
    return of_snapshots(_diagnosed, run)


def _diagnosed(run: Run) -> Diagnosis:
    evidence = Evidence(run)
    doubts = tuple(map(str, run.manifest.get("loop_warnings", ())))
    if not len(evidence.steps):
        if doubts:
            raise InputError(f"{run.path} has recorded nothing. Warned as it ran: {'; '.join(doubts)}.")
        raise InputError(f"{run.path} has recorded nothing yet: diagnose it after its first steps.")
    checked: dict[str, list[str]] = {}
    unchecked: dict[str, str] = {}
    events: list[Event] = []
    unrecorded: list[str] = []
    for kind, detector in DETECTORS.items():
        sources = detector.sources(evidence)
        if not sources and (why := detector.nothing_to_check(evidence)):
            unchecked[kind] = why
        elif not sources:
            needs = " or ".join(f"{name} ({how})" for name, how in detector.reads.items())
            unchecked[kind] = f"not recorded: {needs}"
            unrecorded.append(kind)
        elif (counted := detector.rows(evidence))[0] < detector.least_rows:
            rows, recorded = counted
            which = f"{rows} row{'s' * (rows != 1)}" if rows == recorded else f"{rows} converged rows of {recorded}"
            unchecked[kind] = f"{which} {'is' if which == '1 row' else 'are'} too few, it takes {detector.least_rows}"
        else:
            try:
                with np.errstate(all="ignore"):  # a run holds any number, 1e-310 and inf among them
                    events += detector.find(evidence)
                if detector.in_steps and evidence.without_steps:
                    sources = [source for source in sources if source != LEDGER]
                if sources:
                    checked[kind] = sources
                else:
                    unchecked[kind] = f"not recorded {evidence.without_steps}"
            except Exception as error:
                if (origin := DETECTORS.origin(kind)) == BUILT_IN or isinstance(error, StabilityLabError):
                    raise
                unchecked[kind] = f"the detector {kind!r} of {origin} failed: {in_words(error)}"
    events += announced(evidence)
    status, judged = evidence.status, evidence.verdict
    untold = ("descending", "cannot tell", *(() if "plateau" in checked else ("stuck",)))  # too short for a plateau
    open_ = f"{judged.state}, {judged.reason}" if judged and judged.state in untold else _unjudged(evidence, checked)
    flat = any(event.kind == "plateau" for event in events)
    found = ordered(weighed(events, evidence, learns="plateau" in checked and not open_ and not flat))
    cause = explain(found)
    boxes = checkpoints(run.path, BLACK_BOX)
    unseen = _is_unseen(boxes, judged)
    return Diagnosis(
        run=str(run.path),
        state=status.state,
        step=status.step,
        reason=status.reason,
        events=tuple(found),
        cause=cause,
        checked=checked,
        unchecked=unchecked,
        open=open_,
        unrecorded=tuple(unrecorded),
        unmeasured=unmeasured(run),
        headroom=headroom(evidence),
        attribution=attribution(evidence, *(event.step for event in cause.together[:1])),
        doubts=doubts,
        not_neutral=tuple(map(str, run.manifest.get("not_neutral", ()))),
        audit=audited(run.manifest),
        replayable=bool(boxes) and not unseen,
        untested=UNSEEN if unseen else UNKNOWN if run.kind == "watched" else UNKNOWN_OF_PROBE,
    )


def _is_unseen(boxes: Iterable[int], judged: RunVerdict | None) -> bool:
    """True if a run diverged before its recorder knew a level of the loss, and no black box is of that step, of the
    next one or of one before. A loss that is not finite needs no level, and has such a box. ``boxes``: their steps."""
    if judged is None or judged.state != "diverged" or judged.step >= LEVEL:
        return False
    return min(boxes, default=0) > judged.step + 1


def _unjudged(evidence: Evidence, checked: Mapping[str, Any]) -> str:
    """Say why the loss of a run cannot be judged; "" if all detectors of :data:`HEALTH` were checked.

    A run that has learned by its unigram baseline needs no check for a plateau, however short it is.
    """
    learns = evidence.verdict is not None and evidence.verdict.state in ("trained", "learning")
    missing = [DETECTORS[kind] for kind in HEALTH if kind not in checked and not (learns and kind == "plateau")]
    loss = evidence.loss()
    if not missing:
        return ""
    if loss is None:
        return f"no training loss was recorded ({DETECTORS['loss_spike'].reads['loss']})"
    rows, least = len(loss.steps), max(detector.least_rows for detector in missing)
    return f"its loss has {rows} row{'s' * (rows > 1)}, and the checks need {least}"
