"""The state of a run: diverged, stuck, learning or trained, judged on the held-out batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["diverged", "stuck", "learning", "trained"]

RISE = 2.0  # nats over the running minimum that count as divergence ...
RECOVERY = 0.05  # ... unless undone within this share of the run
WINDOW = 0.20  # the last part of the run, over which "stuck" is judged
STUCK_NATS, STUCK_ACCURACY = 0.05, 0.02
TRAINED_NATS = 0.25


@dataclass(frozen=True)
class Evaluation:
    """The held-out batch after ``step`` updates: unsmoothed cross-entropy in nats a token, and accuracy."""

    step: int
    nll: float
    accuracy: float


@dataclass(frozen=True)
class Verdict:
    """A state, the step since which it holds, and the evidence in one sentence.

    ``nll_gap`` and ``accuracy_gap`` are the last evaluation minus the unigram baseline.
    """

    state: State
    step: int
    reason: str
    nll_gap: float
    accuracy_gap: float


def divergence(evaluations: Sequence[Evaluation], steps: int, last_step: int) -> tuple[int, str] | None:
    """The step and reason of the first divergence so far, or None.

    Diverged: a non-finite held-out loss, or a rise of more than 2 nats over the running minimum that is not undone
    within 5 % of the run's ``steps``.
    """
    lowest, rise_since = math.inf, None
    for evaluation in evaluations:
        if not math.isfinite(evaluation.nll):
            return evaluation.step, f"the held-out loss is {evaluation.nll} at step {evaluation.step}"
        if evaluation.nll > lowest + RISE:
            rise_since = evaluation if rise_since is None else rise_since
            if evaluation.step - rise_since.step >= RECOVERY * steps or evaluation.step >= last_step:
                return rise_since.step, (
                    f"the held-out loss rose more than {RISE:g} nats over its minimum of {lowest:.3f} "
                    f"at step {rise_since.step} and did not come back"
                )
        else:
            rise_since = None
            lowest = min(lowest, evaluation.nll)
    return None


def judge(
    evaluations: Sequence[Evaluation],
    *,
    steps: int,
    unigram_nll: float,
    unigram_accuracy: float,
    non_finite: tuple[int, str] | None = None,
) -> Verdict:
    """The state of a run of ``steps`` updates, by the rules of measurement (u, a: the training set's unigram baseline).

    ``diverged``: ``non_finite`` (a step and what was not finite in training) or :func:`divergence`. ``stuck``: at every
    evaluation in the last 20 % of steps nll > u - 0.05 and accuracy < a + 0.02. ``trained``: the last nll < u - 0.25.
    ``learning``: otherwise. Raises ValueError where there is no evaluation at all.
    """
    if not evaluations:
        raise ValueError("a run without an evaluation has no state")
    last = evaluations[-1]
    gaps = {"nll_gap": last.nll - unigram_nll, "accuracy_gap": last.accuracy - unigram_accuracy}
    found = non_finite or divergence(evaluations, steps, last.step)
    if found:
        return Verdict("diverged", found[0], found[1], **gaps)

    def on_plateau(evaluation: Evaluation) -> bool:
        return evaluation.nll > unigram_nll - STUCK_NATS and evaluation.accuracy < unigram_accuracy + STUCK_ACCURACY

    window = [e for e in evaluations if e.step >= (1 - WINDOW) * steps] or [last]
    if all(on_plateau(e) for e in window):
        since = _since(evaluations, on_plateau)
        return Verdict("stuck", since, "no better than the unigram distribution", **gaps)
    if last.nll < unigram_nll - TRAINED_NATS:
        since = _since(evaluations, lambda e: e.nll < unigram_nll - TRAINED_NATS)
        return Verdict("trained", since, f"{-gaps['nll_gap']:.2f} nats below the unigram baseline", **gaps)
    since = _since(evaluations, lambda e: not on_plateau(e))
    return Verdict("learning", since, "left the unigram plateau, less than 0.25 nats below it", **gaps)


def _since(evaluations: Sequence[Evaluation], holds) -> int:
    """First step of the unbroken run of evaluations, up to the last, at which ``holds``."""
    since = evaluations[-1].step
    for evaluation in reversed(evaluations):
        if not holds(evaluation):
            break
        since = evaluation.step
    return since
