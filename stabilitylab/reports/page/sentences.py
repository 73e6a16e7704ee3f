"""A run in one sentence: what it is, how it ended or where it stands, and what was found in it."""

from __future__ import annotations

import math

import numpy as np

from ...diagnose import Diagnosis
from ...errors import listed
from .. import style
from ..collection import Record
from ..run_grid import read

WORTH_SAYING = 10.0  # factor by which a stack's gradient falls; a smaller one is no trouble for a run
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def heading(record: Record) -> str:
    """Return ``Post-LN 100L-100L``; of a watched run its name, since many such runs have one class of model."""
    return record.name if record.kind == "watched" else f"{style.title(record.label)} {record.layers_text}".strip()


def sentence(record: Record, found: Diagnosis | None) -> str:
    """``Post-LN 100L-100L: stuck, 0.23 nats above the unigram baseline after 160 steps; the decoder's gradient falls
    2×10⁸-fold from layer 100 to layer 1 at step 0.``"""
    said = [f"{heading(record)}: {standing(record, found)}"]
    if found is not None:
        weak = [event.kind for event in found.cause.together] == ["vanishing_gradient"]  # the fold says that in short
        said.append((weak and fall(record)) or trouble(found) or fall(record) or _nothing(record, found))
        said.append(found.headroom)
    said.append(record.undiagnosed)
    text = ""
    for part in filter(None, said):  # evidence may be sentences of its own
        text += f"{'. ' if part[0].isupper() else '; '}{part}" if text else part
    return f"{text}."


def standing(record: Record, found: Diagnosis | None = None) -> str:
    """The state in plain words, with the distance to the baseline and the steps behind it."""
    status, verdict = record.status, record.judged
    if verdict is None:
        of = f" of {record.updates}" if record.updates else ""
        where = f"{status.state} at step {status.step}{of}{_failure(record, found)}"
        return f"{where} ({status.reason})" if status.reason and status.state != "running" else where
    if verdict.state == "diverged":
        return f"diverged at step {verdict.step}: {verdict.reason.removesuffix(f' at step {verdict.step}')}"
    if verdict.state == "cannot tell" or not math.isfinite(verdict.nll_gap):
        return f"{verdict.state}: {verdict.reason}"
    side = "above" if verdict.nll_gap > 0 else "below"
    return f"{verdict.state}, {abs(verdict.nll_gap):.2f} nats {side} the unigram baseline after {status.step} steps"


def _failure(record: Record, found: Diagnosis | None) -> str:
    """``, failed: plateau at step 66`` of a run that went on to its end; "" if it did not fail, or if the first sign
    is the failure."""
    failures = [] if found is None else [event for event in found.events if event.severity == "failure"]
    first = min(failures, key=lambda event: event.moment, default=None)
    if first is None or found is None or first in found.cause.together or record.status.state != "finished":
        return ""
    return f", failed: {first.title} at step {first.step}"


def trouble(found: Diagnosis) -> str:
    """The evidence of what came first, up to the first semicolon; "" if nothing was found."""
    return "; ".join(event.evidence.partition(";")[0].rstrip(".") for event in found.cause.together)


def fall(record: Record) -> str:
    """The fall of the gradient in the stack where it differs most between two layers at the first probed step; "" if
    it falls less than WORTH_SAYING times."""
    return record.remember("fall", lambda: _fall(record), keep=True)


def _fall(record: Record) -> str:
    grid = read(record, "grad_norm") if "grad_norm" in record.tables else None
    if grid is None:
        return ""
    first = np.where(grid.absent, np.nan, grid.values)[:, 0]
    best = ("", WORTH_SAYING)
    for stack in dict.fromkeys(grid.stacks.tolist()):
        rows = np.flatnonzero((grid.stacks == stack) & np.isfinite(first) & (first > 0))
        if not len(rows):
            continue
        high, low = (int(rows[place(first[rows])]) for place in (np.argmax, np.argmin))
        times = float(first[high] / first[low])
        if times >= best[1]:
            of = f"the {stack}'s" if stack else "the"
            where = f"from layer {grid.layers[high]} to layer {grid.layers[low]} at step {grid.steps[0]}"
            best = (f"{of} gradient falls {fold(times)}-fold {where}", times)
    return best[0]


def fold(times: float) -> str:
    """Write a factor as ``40`` or ``2×10⁸``."""
    if times < 1000:
        return f"{times:.2g}"
    digits, _, power = f"{times:.0e}".partition("e")
    return f"{digits}×10{str(int(power)).translate(RAISED)}"


def _nothing(record: Record, found: Diagnosis) -> str:
    """Say that no kind of trouble was found, and how many were checked.

    The notes follow, each kind with its first step, and then what may still come of them.
    """
    if not found.checked:
        return ""
    notes: dict[str, int] = {}
    for event in found.events:
        notes[event.title] = min(event.step, notes.get(event.title, event.step))
    told = listed([f"{title} at step {step}" for title, step in notes.items()])
    harm = "" if found.pending else " that did harm"
    noted = f"{harm} (noted: {told})" if notes else ""
    untold = f"; {listed(found.pending)}" if found.pending else ""
    if found.open and record.judged is None:  # else its state says so
        untold += f"; it is not known whether the run trains: {found.open}"
    return f"none of {len(found.checked)} kinds of trouble was found{noted}{untold}"
