"""The two kinds of Post-LN: DeepNet's, with Xavier gain 1 for every matrix, and fairseq's, with smaller q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps

from .. import style
from ..base import MissingRuns
from ..claims import Effect, Share, described
from ..collection import Runs

OWN, FAIRSEQS = " gain=1", ""  # endings of a Post-LN's label
WORDS = {OWN: "gain 1", FAIRSEQS: "fairseq's gain"}  # DeepNet's first: where it is there, it decides


def by_gain(measure: Callable[[Runs, str], Sequence[Effect | Share]]) -> Callable[[Runs], list[Effect | Share]]:
    """Decorate the measure of a claim that takes runs and the ending of a Post-LN's label.

    The decorated measure returns the effects for DeepNet's gain, which decide, and then those for fairseq's gain, which
    describe. Without runs of DeepNet's gain, fairseq's decides. Raises MissingRuns if there are runs of neither.
    """

    @wraps(measure)
    def measure_both(runs: Runs) -> list[Effect | Share]:
        found: list[Effect | Share] = []
        lacking: list[MissingRuns] = []
        for ending, words in WORDS.items():
            try:
                effects = [replace(effect, name=f"{effect.name}, {words}") for effect in measure(runs, ending)]
            except MissingRuns as missing:
                lacking.append(missing)
                continue
            found += [described(effect) for effect in effects] if found else effects
        if not found:
            raise lacking[0 if any(label.endswith(OWN) for label in runs.labels) else -1]  # about runs that are there
        return found

    return measure_both


def of_gain_one(labels: Sequence[str], label: str) -> str:
    """Return ``label`` with DeepNet's gain if ``labels`` have it, else ``label`` itself."""
    return label + OWN if label + OWN in labels else label


def beside(labels: Sequence[str], label: str) -> bool:
    """Return True if ``labels`` also hold this Post-LN with DeepNet's gain of 1, beside fairseq's gain."""
    return of_gain_one(labels, label) != label


def dash(labels: Sequence[str], label: str) -> str:
    """Return "dashed" for the label of fairseq's gain beside gain 1, so that the eye goes to gain 1; else "solid"."""
    return "dashed" if beside(labels, label) else "solid"


def shown_dash(labels: Sequence[str], label: str) -> str:
    """Return the dash of a Post-LN: "solid" for DeepNet's, "dashed" for fairseq's beside it; "" for other labels."""
    postln = style.family(label) in ("postln", "postln-init")
    return dash(labels, label) if postln and label.removesuffix(OWN) in ("postln", "postln-init") else ""
