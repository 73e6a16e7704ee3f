#!/usr/bin/env python
"""Scores the rule of consequence on the corpus, whose both halves were looked at before: numbers of a spent corpus.

    python results/alarm/consequence.py      # consequence.csv

The rule (``stabilitylab/diagnose/consequence.py``) was committed before this file was written. Events are those that
``diagnose`` found when the corpus was made (``runs.csv``); the loss, the rate and the gradient norm after them are in
the features. If the condition of an event stood at the end is known for those three and for layers without a gradient.
For all other kinds it is not, so that each number is given twice: as if all of these stood (``unknown stands``), and as
if none did. The ledger names nothing here: the corpus has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from corpus import HERE, CorpusRun, lines, read
from diagnosed import ACCUSED, NAMEABLE, SYMPTOMS, ill, share
from score import write

from stabilitylab.diagnose import Event
from stabilitylab.diagnose.cause import explain, ordered
from stabilitylab.diagnose.consequence import weighed
from stabilitylab.diagnose.detectors.gradients import EXPLODED
from stabilitylab.diagnose.detectors.losses import loss_spike
from stabilitylab.diagnose.evidence import Evidence, Grid
from stabilitylab.diagnose.series import PAST, at_the_end
from stabilitylab.schema import Row

# The phase whose numbers show each kind; all tables of the corpus have every row.
PHASES = {
    "attention_collapse": "forward", "attention_logits": "forward", "beyond_the_edge": "reference",
    "dead_layer": "backward", "divergence": "loss", "exploding_gradient": "backward", "ln_growth": "forward",
    "loss_rise": "loss", "loss_spike": "loss", "lr_jump": "setting", "non_finite": "loss", "plateau": "loss",
    "rank_collapse": "backward", "update_jump": "update", "vanishing_gradient": "backward", "weight_jump": "between",
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """The parts of :class:`Evidence` that the rule reads, of one run of the corpus."""

    nll: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        return np.arange(len(self.nll))

    @property
    def status(self) -> Any:
        return SimpleNamespace(state="finished")

    def loss(self) -> Grid:
        values = self.nll[:, None]
        return Grid("metrics", "nll", "loss", self.steps, (Row(""),), values, np.zeros(values.shape, bool))


def stands(kind: str, step: int, columns: Mapping[str, np.ndarray], seen: Seen) -> bool | None:
    """Return True if the condition of an event holds at the end; None if the features do not tell."""
    if kind == "dead_layer":
        return True  # one that passed is a note
    if kind == "lr_jump":
        rates = columns["lr"]
        return not bool((rates[step + 1 :] <= rates[:step].max(initial=0.0)).any())
    if kind == "loss_spike":
        ends = {event.step: event.until for event in loss_spike(cast(Evidence, seen))}
        return step in ends and ends[step] is None
    if kind == "exploding_gradient":
        norms = columns["gradient"]
        usual = norms[max(0, step - PAST) : step]
        usual = usual[np.isfinite(usual)]
        return len(usual) > 0 and at_the_end(norms, step) > EXPLODED * float(np.median(usual))
    if kind in ("beyond_the_edge", "loss_rise"):
        return False  # the rule asks for something else
    return None


def weighed_again(run: Mapping[str, str], columns: Mapping[str, np.ndarray], unknown: bool) -> list[Event]:
    """Return the events of a run as the rule has them; ``unknown``: whether a condition stands that is not known."""
    seen = Seen(np.asarray(columns["nll"], float))
    events = []
    for kind, step, severity, strength in json.loads(run["diagnosis"])["events"]:
        own = Event(
            kind, kind, int(step), PHASES[kind], "", severity, int(step) - 1 if step else None, strength=strength
        )
        known = stands(kind, int(step), columns, seen)
        events.append(replace(own, stands=unknown if known is None else known))
    return ordered(weighed(events, cast(Evidence, seen), learns=False))


def first_of(events: Sequence[Event]) -> frozenset[str]:
    return frozenset(event.kind for event in explain(events).together)


def is_accused(events: Sequence[Event]) -> bool:
    return any(event.severity in ACCUSED for event in events)


def is_right(family: str, first: frozenset[str]) -> bool:
    can, named = NAMEABLE[family], first - SYMPTOMS
    return bool(named & can) if can else not named


def scored(half: str, runs: Sequence[Mapping[str, str]], columns: Sequence[CorpusRun]) -> Iterable[dict[str, str]]:
    own = {each.name: each.columns for each in columns}
    sick = [run for run in runs if ill(run) and run["family"] in NAMEABLE]
    well = [run for run in runs if not ill(run) and not run["open"]]
    before = {run["run"]: json.loads(run["diagnosis"]) for run in runs}
    for rule in ("before", "unknown stands", "unknown does not stand"):
        if rule == "before":
            accused = {name: found["verdict"] in ACCUSED for name, found in before.items()}
            first = {name: frozenset(found["first"]) for name, found in before.items()}
        else:
            again = {run["run"]: weighed_again(run, own[run["run"]], rule == "unknown stands") for run in runs}
            accused = {name: is_accused(events) for name, events in again.items()}
            first = {name: first_of(events) for name, events in again.items()}
        outside = [run for run in sick if run["at"]]
        behind = [run for run in sick if not run["at"] and run["why"] == "behind its twin"]
        for measure, count, of in (
            ("accused, of healthy runs", sum(accused[run["run"]] for run in well), len(well)),
            ("said to be ill, of what was", sum(accused[run["run"]] for run in sick), len(sick)),
            ("said to be ill, of faults from outside", sum(accused[run["run"]] for run in outside), len(outside)),
            ("said to be ill, of runs behind a slower twin", sum(accused[r["run"]] for r in behind), len(behind)),
            ("right cause, of what was wrong", sum(is_right(r["family"], first[r["run"]]) for r in sick), len(sick)),
        ):
            yield {"half": half, "rule": rule, "measure": measure, **share(count, of)}


def main(folder: Path = HERE) -> None:
    found: list[dict[str, str]] = []
    for half in ("train", "test"):
        found += scored(half, [run for run in lines(folder) if run["half"] == half], read(half, folder))
    write(folder / "consequence.csv", found)


if __name__ == "__main__":
    main()
