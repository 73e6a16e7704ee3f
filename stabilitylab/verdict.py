"""The verdict on a run, judged on held-out text: its loss beside the unigram baseline, and the trend of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

__all__ = ["LEVEL_NATS", "READS_NATS", "STATES", "Baseline", "Evaluation", "Trend", "Verdict", "judge"]

UNREAD: Literal["ignores its source"] = "ignores its source"
State = Literal["diverged", "stuck", "descending", "learning", "trained", "ignores its source", "cannot tell"]
STATES: tuple[State, ...] = ("trained", "learning", UNREAD, "descending", "stuck", "diverged", "cannot tell")
RULE = 3  # the version of this rule; a verdict of another version is judged again when its run is read

RISE = 2.0  # nats over the running minimum that count as divergence ...
RECOVERY = 0.05  # ... unless undone within this share of the run
WINDOW = 0.20  # the last part of the run, through which the line is drawn, ...
LEAST = 8  # ... but never through fewer evaluations
# Updates below which no run is said not to learn: the second moment of Adam averages over 50 of them at beta2 = .98,
# and most warm-ups take longer.
TOO_EARLY = 50
LEVEL_NATS = 0.05  # a loss within this of the baseline is at it
TRAINED_NATS = 0.25
# Nats a token by which the loss must grow with another sentence's source, or an encoder-decoder ignores its source. Of
# the 102 runs of results/tiny/second/source.csv 54 have less than .001 and 48 at least .43: a limit between fits them.
READS_NATS = 0.1
# Nats per tenth of the run: a loss whose fall is certainly smaller than this is stuck. Fixed on seeds 100 to 102 of
# results/states, judged on other seeds: docs/states.md has the error rates.
MATERIAL = 0.02


@dataclass(frozen=True)
class Evaluation:
    """Held-out text after ``step`` updates: unsmoothed cross-entropy in nats a token, and accuracy."""

    step: int
    nll: float
    accuracy: float = math.nan


@dataclass(frozen=True)
class Baseline:
    """The score of a model that ignores its input and answers the training set's unigram distribution, or answers
    evenly if its loss is then lower."""

    nll: float
    accuracy: float = math.nan

    @classmethod
    def of(cls, recorded: Mapping[str, Any] | None, vocab: int | None = None) -> Baseline | None:
        """Read the baseline of the data from run.json; None if run.json has none.

        ``vocab``: the number of labels, if it is known. The loss of a baseline is at most ln(vocab), that of a uniform
        guess.
        """
        if not recorded:
            return None
        uniform = math.log(vocab) if vocab else math.inf
        return cls(min(float(recorded["cross_entropy"]), uniform), float(recorded["accuracy"]))


@dataclass(frozen=True)
class Trend:
    """The fall of the held-out loss in nats per tenth of the run (negative: it rises), with its 95 % interval.

    The least-squares line through the last evaluations; the interval is the t-interval of its slope, widened by
    sqrt((1 + r) / (1 - r)) for the residuals' lag-1 autocorrelation r, where that is positive.
    """

    fall: float
    low: float
    high: float
    evaluations: int

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Trend:
        """Read the trend from status.json."""
        ends = {name: float(recorded[name]) for name in ("fall", "low", "high")}
        return cls(**{**recorded, **ends})

    def __str__(self) -> str:
        return f"{self.fall:.3f} [{self.low:.3f}, {self.high:.3f}] nats per tenth of the run"


@dataclass(frozen=True)
class Verdict:
    """A state, the step since which it holds, and the evidence in one sentence.

    ``nll_gap`` and ``accuracy_gap`` are the last evaluation minus the unigram baseline: on the validation set where
    ``sentences`` counts it, else on the held-out batch. ``trend``: None with too few evaluations.
    ``source_worth``: by how much another sentence's source raises the loss of an encoder-decoder [nats/token], as last
    measured; None if not measured.
    """

    state: State
    step: int
    reason: str
    nll_gap: float
    accuracy_gap: float
    trend: Trend | None = None
    sentences: int = 0
    source_worth: float | None = None
    rule: int = RULE

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Verdict:
        """Read the verdict from status.json, in which numbers that are not finite are text."""
        trend = recorded.get("trend")
        numbers = {name: float(recorded[name]) for name in ("nll_gap", "accuracy_gap")}
        if (worth := recorded.get("source_worth")) is not None:
            numbers["source_worth"] = float(worth)
        return cls(**{**recorded, **numbers, "trend": Trend.of(trend) if trend else None})

    def recorded(self) -> dict[str, Any]:
        return asdict(self)


def divergence(evaluations: Sequence[Evaluation], steps: int, last_step: int) -> tuple[int, str] | None:
    """Return the step and reason of the first divergence so far, or None.

    Diverged: a non-finite held-out loss, or a rise of more than 2 nats over the running minimum that is not undone
    within 5 % of the run's ``steps``.
    """
    lowest, lowest_at, rise_since = math.inf, 0, None
    for evaluation in evaluations:
        if not math.isfinite(evaluation.nll):
            return evaluation.step, f"the held-out loss is {evaluation.nll} at step {evaluation.step}"
        if evaluation.nll > lowest + RISE:
            rise_since = evaluation if rise_since is None else rise_since
            if evaluation.step - rise_since.step >= RECOVERY * steps or evaluation.step >= last_step:
                at = evaluation.step
                still = f" and was still there at step {at}" if at > rise_since.step else ", the last evaluation"
                return rise_since.step, (
                    f"the held-out loss rose more than {RISE:g} nats over its minimum of {lowest:.3f} "
                    f"(step {lowest_at}) at step {rise_since.step}{still}"
                )
        else:
            rise_since = None
            if evaluation.nll < lowest:
                lowest, lowest_at = evaluation.nll, evaluation.step
    return None


def trend(evaluations: Sequence[Evaluation]) -> Trend | None:
    """Fit the line through the last fifth of the run up to the last evaluation.

    If that fifth has fewer than 8 evaluations, the line goes through the last 8. With fewer than 8 in all the trend is
    None.
    """
    if len(evaluations) < LEAST or not evaluations[-1].step:
        return None
    end = evaluations[-1].step
    inside = sum(e.step >= (1 - WINDOW) * end for e in evaluations)
    last = evaluations[-max(LEAST, inside) :]
    x = np.array([10 * e.step / end for e in last])
    y = np.array([e.nll for e in last])
    x = x - x.mean()
    slope = float(x @ y / (x @ x))
    residuals = y - y.mean() - slope * x
    variance = float(residuals @ residuals)
    r = float(residuals[1:] @ residuals[:-1]) / variance if variance else 0.0
    error = math.sqrt(variance / (len(x) - 2) / float(x @ x)) * math.sqrt((1 + max(0.0, r)) / (1 - max(0.0, r)))
    half = error * _t975(len(x) - 2)
    return Trend(-slope, -slope - half, -slope + half, len(x))


def judge(
    evaluations: Sequence[Evaluation],
    baseline: Baseline,
    *,
    steps: int,
    non_finite: tuple[int, str] | None = None,
    validation: tuple[Evaluation, Baseline, int] | None = None,
    source_worth: float | None = None,
) -> Verdict:
    """Return the verdict on a run of ``steps`` updates.

    - ``evaluations``: those of the held-out batch during the run. ``baseline``: the unigram baseline on that batch.
    - ``validation``: the last evaluation on the validation set, its baseline, and the number of its sentences.
    - ``source_worth``: for an encoder-decoder, the increase of the loss with another sentence's source [nats/token].
    - ``non_finite``: a step, and what was not finite in training.

    The verdict follows from the gap between loss and baseline (on the validation set if there is one) and from the
    :func:`trend` of the held-out loss:

    - ``diverged``: there is ``non_finite`` or a :func:`divergence`;
    - ``ignores its source``: gap < -0.05 nats, and ``source_worth`` below .1: a language model, not a translator;
    - ``trained``: gap < -0.25 nats; ``learning``: gap < -0.05 nats;
    - otherwise the loss is at or above the baseline. ``stuck``: the interval of the fall lies below ``MATERIAL``.
      ``descending``: the interval lies above 0, and the fall itself is not below ``MATERIAL`` (too early to say).
      ``cannot tell``: neither holds, or there are fewer than 8 evaluations; it also replaces ``stuck`` after fewer than
      ``TOO_EARLY`` updates.

    Raises ValueError if there is no evaluation at all.
    """
    if not evaluations:
        raise ValueError("a run without an evaluation has no state")
    last, zero, sentences = validation or (evaluations[-1], baseline, 0)
    gap = last.nll - zero.nll
    moving = trend([e for e in evaluations if math.isfinite(e.nll)])

    def verdict(state: State, step: int, reason: str) -> Verdict:
        return Verdict(state, step, reason, gap, last.accuracy - zero.accuracy, moving, sentences, source_worth)

    if found := non_finite or divergence(evaluations, steps, evaluations[-1].step):
        return verdict("diverged", *found)
    where = _place(gap)
    if gap < -LEVEL_NATS and source_worth is not None and not source_worth >= READS_NATS:
        reason = f"{where}, but a wrong source changes the validation loss by {_nats(source_worth)}"
        return verdict(UNREAD, _since(evaluations, lambda e: e.nll < baseline.nll - LEVEL_NATS), reason)
    below: tuple[tuple[State, float], ...] = (("trained", TRAINED_NATS), ("learning", LEVEL_NATS))
    for state, nats in below:
        if gap < -nats:
            return verdict(
                state, _since(evaluations, lambda e, n=nats: e.nll < baseline.nll - n), where + _going(moving)
            )
    start = evaluations[-LEAST:][0].step
    if moving is None:
        count = f"{len(evaluations)} evaluation{'s' * (len(evaluations) > 1)}"
        return verdict("cannot tell", start, f"{where}, and {count} cannot show whether it falls: {LEAST} are needed")
    if moving.high < MATERIAL:
        if (updates := evaluations[-1].step) < TOO_EARLY:
            early = f"too early to tell after {updates} updates, since no run is called stuck before {TOO_EARLY}"
            return verdict("cannot tell", start, f"{where}{_going(moving)}; {early}")
        low, high = min(e.nll for e in evaluations[-LEAST:]), max(e.nll for e in evaluations[-LEAST:])
        since = _since(evaluations, lambda e: low - LEVEL_NATS <= e.nll <= high + LEVEL_NATS)
        return verdict("stuck", since, where + _going(moving))
    if moving.low > 0 and moving.fall >= MATERIAL:
        since = _since(evaluations, lambda e: e.nll >= baseline.nll - LEVEL_NATS)
        return verdict("descending", since, f"{where}{_going(moving)}; too early to say more")
    return verdict("cannot tell", start, f"{where}; it is not clear if the loss falls: {moving}")


def judge_recorded(
    columns: Mapping[str, Sequence[float | None]], manifest: Mapping[str, Any], *, whole: bool
) -> Verdict | None:
    """Return :func:`judge`'s verdict on a recorded run: ``columns`` of its metrics (None: not measured in that row),
    run.json.

    ``whole``: the last row is the one after training. None for a run without a held-out loss and a unigram baseline.
    """
    train, data = (manifest.get("config") or {}).get("train") or {}, manifest.get("data") or {}
    vocab, steps = data.get("target_vocab"), [int(step or 0) for step in columns["step"]]
    baseline = Baseline.of(manifest.get("unigram"), vocab)
    missing: Sequence[float | None] = [None] * len(steps)

    def measured(nll: str, accuracy: str) -> list[Evaluation]:
        found = zip(steps, columns.get(nll, missing), columns.get(accuracy, missing), strict=True)
        return [Evaluation(t, float(x), math.nan if a is None else float(a)) for t, x, a in found if x is not None]

    evaluations = measured("held_out_nll", "held_out_accuracy")
    if baseline is None or not evaluations:
        return None
    end = Baseline.of(manifest.get("validation_unigram"), vocab)
    after = measured("validation_nll", "validation_accuracy")
    broken = [
        (step, f"{name} is {value} at step {step}")
        for name in ("loss", "grad_norm_total")
        for step, value in zip(steps, columns.get(name, missing), strict=True)
        if value is not None and not math.isfinite(value)
    ]
    worth = [value for value in columns.get("source_worth", missing) if value is not None]
    return judge(
        evaluations,
        baseline,
        steps=int(train.get("steps", steps[-1])),
        non_finite=min(broken, default=None),
        validation=(after[-1], end, int(data.get("validation", 0))) if whole and end and after else None,
        source_worth=float(worth[-1]) if worth else None,
    )


def _place(gap: float) -> str:
    """Say in words where a loss stands beside the unigram baseline."""
    if abs(gap) <= LEVEL_NATS:
        return f"at the unigram baseline ({gap:+.3f} nats)"
    return f"{abs(gap):.2f} nats {'above' if gap > 0 else 'below'} the unigram baseline"


def _nats(value: float) -> str:
    """Write nats per token in words, such as "only 0.004 nats a token"."""
    return f"only {value:.2g} nats a token" if abs(value) >= 0.001 else "less than 0.001 nats a token"


def _going(moving: Trend | None) -> str:
    """Say in words how a loss moves; "" if not known."""
    if moving is None:
        return ""
    if moving.low > 0 and moving.fall >= MATERIAL:
        return f", and falling by {moving}"
    rising = Trend(-moving.fall, -moving.high, -moving.low, moving.evaluations)
    if moving.high < -MATERIAL:
        return f", and rising by {rising}"
    if moving.high >= MATERIAL:
        return ""
    if moving.high < 0:
        return f", and hardly rising ({rising})"
    return f", and {'hardly' if moving.low > 0 else 'no longer'} falling ({moving})"


def _since(evaluations: Sequence[Evaluation], holds: Callable[[Evaluation], bool]) -> int:
    """Return the first step of the unbroken series of evaluations, up to the last, for which ``holds`` is True."""
    since = evaluations[-1].step
    for evaluation in reversed(evaluations):
        if not holds(evaluation):
            break
        since = evaluation.step
    return since


def _t975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit  # slow to import, and the command line's start reads this module

    return float(stdtrit(freedom, 0.975))
