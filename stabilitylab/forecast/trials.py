"""Short trials: the model's first 150 updates at one constant rate after another, and the rates at which it stops
learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..verdict import Baseline, Evaluation, State, divergence, judge
from .candidate import Candidate
from .ramp import held_out, one_update

UPDATES, EVERY = 150, 5  # updates of a trial, and from one evaluation to the next
LEARNS: tuple[State, ...] = ("trained", "learning", "descending")
SAFE_NATS = 0.5  # a trial ends so far below the baseline: no run of results/states came back from there
START, LOWEST, HIGHEST, FACTOR = 1e-3, 3e-5, 0.5, 2.0  # rates are START x FACTOR^k between the other two


@dataclass(frozen=True)
class Trial:
    """The result of one trial. ``state``: the verdict after ``updates`` at ``rate``
    (:func:`stabilitylab.verdict.judge`); ``gap``: held-out loss minus the unigram baseline [nats]."""

    rate: float
    state: State
    gap: float
    updates: int

    @property
    def learns(self) -> bool:
        return self.state in LEARNS


@dataclass(frozen=True)
class Trials:
    """All trials with one ``warmup``, in their order. ``low``: the largest rate below every rate that did not learn;
    ``high``: the smallest rate that did not learn; 0 and inf if there is none."""

    warmup: int
    each: Sequence[Trial]

    @property
    def high(self) -> float:
        return min((one.rate for one in self.each if not one.learns), default=math.inf)

    @property
    def low(self) -> float:
        return max((one.rate for one in self.each if one.learns and one.rate < self.high), default=0.0)

    @property
    def edge(self) -> float:
        """Return log10 of the rate half way between ``low`` and ``high``; half a step beyond the outermost rate if all
        or none learn."""
        half = math.sqrt(FACTOR)
        low, high = self.low or self.high / FACTOR, self.high if math.isfinite(self.high) else self.low * FACTOR
        return math.log10(low * half) if low and math.isfinite(high) else math.nan

    @property
    def sentence(self) -> str:
        """Name the highest rate at which the model was seen to learn."""
        if not self.low:
            return f"its trials learn at no rate, the lowest being {self.high:.2g}"
        above = f" and not at {self.high:.2g}" if math.isfinite(self.high) else ", the highest that was tried"
        return f"its trials learn up to a rate of {self.low:.2g}{above}"


def trials(candidate: Candidate, warmups: Sequence[int]) -> Mapping[int, Trials]:
    """Search the critical rate with each warm-up: from ``START``, then from the result of the warm-up before.

    The search does not depend on the rate that was asked for: at a very low rate, 150 updates show no fall. Raises
    ValueError without a baseline, since a stuck model could not be recognised.
    """
    if candidate.baseline is None:
        raise ValueError("a trial is held against a baseline")
    found: dict[int, Trials] = {}
    low, high = (math.log(end / START) / math.log(FACTOR) for end in (LOWEST, HIGHEST))
    start = 0
    for warmup in warmups:
        known: dict[int, Trial] = {}

        def learns(k: int, warmup: int = warmup, known: dict[int, Trial] = known) -> bool:
            if k not in known:
                known[k] = trial(candidate, START * FACTOR**k, warmup)
            return known[k].learns

        start = search(learns, start, math.ceil(low), math.floor(high))
        found[warmup] = Trials(warmup, tuple(known.values()))
    return found


def search(learns: Callable[[int], bool], start: int, lowest: int, highest: int) -> int:
    """Return the last number that learns before the first that does not, ``lowest`` if none learns.

    The search goes from ``start`` in steps of 1, 2, 4, ... upwards or downwards, then by halves.
    """
    good, bad, step = lowest - 1, highest + 1, 1
    at = start
    while bad - good > 1:
        if learns(at):
            good = at
            at = at + step if bad > highest else (good + bad) // 2
        else:
            bad = at
            at = at - step if good < lowest else (good + bad) // 2
        step *= 2
        at = max(lowest, min(highest, at))
    return max(good, lowest)


def trial(candidate: Candidate, rate: float, warmup: int) -> Trial:
    """Run a fresh model's first updates at ``rate``, constant behind a linear warm-up."""
    model = candidate.model()
    optimizer = candidate.optimizer(model, rate)
    shares = [group.get("share", 1.0) for group in optimizer.param_groups]
    baseline = Baseline(candidate.baseline if candidate.baseline is not None else math.nan)
    seen = [Evaluation(0, held_out(candidate, model, 0))]
    for update in range(UPDATES):
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rate * share * (min(1.0, (update + 1) / warmup) if warmup else 1.0)
        one_update(candidate, model, optimizer, update)
        if (update + 1) % EVERY:
            continue
        seen.append(Evaluation(update + 1, held_out(candidate, model, update + 1)))
        if seen[-1].nll < baseline.nll - SAFE_NATS or divergence(seen, UPDATES, UPDATES):
            break
    verdict = judge(seen, baseline, steps=UPDATES)
    return Trial(rate, verdict.state, verdict.nll_gap, seen[-1].step)


def trial_lines(found: Mapping[int, Trials], loss: str) -> Iterator[str]:
    """Yield a line for each warm-up: the rates at which the model learned and did not, with the gap to the baseline;
    ``loss``: held-out or training."""
    for warmup, own in found.items():
        rates = sorted(own.each, key=lambda one: one.rate)
        good = [f"{one.rate:.2g}" for one in rates if one.learns]
        bad = [f"{one.rate:.2g} ({one.state}, {one.gap:+.2f})" for one in rates if not one.learns]
        told = f"learn at {', '.join(good)}" if good else f"learn at none of {len(bad)} rates"
        told += f", not at {', '.join(bad)}" if bad else ""
        warm = f"a warm-up of {warmup}" if warmup else "no warm-up"
        yield f"trials of {UPDATES} updates with {warm}, by the {loss} loss: {told}"
