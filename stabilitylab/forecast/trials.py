"""Short trials: the model's first 150 updates at one constant rate after another, and where they stop to learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..verdict import Baseline, Evaluation, State, divergence, judge
from .candidate import Candidate
from .ramp import held_out, one_update

UPDATES, EVERY = 150, 5  # of a trial; it is evaluated every so many
LEARNS: tuple[State, ...] = ("trained", "learning", "descending")
SAFE_NATS = 0.5  # below the baseline a trial ends: of the runs of results/states that stood there none came back
START, LOWEST, HIGHEST, FACTOR = 1e-3, 3e-5, 0.5, 2.0  # rates are START x FACTOR^k between the other two


@dataclass(frozen=True)
class Trial:
    """``state``: after ``updates`` at ``rate``, by :func:`stabilitylab.verdict.judge`; ``gap``: held-out loss minus the
    unigram baseline [nats]."""

    rate: float
    state: State
    gap: float
    updates: int

    @property
    def learns(self) -> bool:
        return self.state in LEARNS


@dataclass(frozen=True)
class Trials:
    """All trials with one ``warmup``, in the order in which they were made. ``low``: the largest rate below every one
    that did not learn, ``high``: the smallest that did not; 0 and inf where there is none."""

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
        """log10 of the rate half way; half a step beyond the outermost rate where all learn, or none."""
        half = math.sqrt(FACTOR)
        low, high = self.low or self.high / FACTOR, self.high if math.isfinite(self.high) else self.low * FACTOR
        return math.log10(low * half) if low and math.isfinite(high) else math.nan

    @property
    def sentence(self) -> str:
        """How far up the model was seen to learn."""
        if not self.low:
            return f"its trials learn at no rate, the lowest being {self.high:.2g}"
        above = f" and not at {self.high:.2g}" if math.isfinite(self.high) else ", the highest that was tried"
        return f"its trials learn up to a rate of {self.low:.2g}{above}"


def trials(candidate: Candidate, warmups: Sequence[int]) -> Mapping[int, Trials]:
    """Looks for the edge with each warm-up: from ``START``, then from where the one before has it.

    No rate that is asked for changes where it is looked for: at a very low one 150 updates show no fall.

    Raises ValueError without a baseline: what is stuck cannot be told then.
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
    """The last number that learns before the first that does not, ``lowest`` where none learns: from ``start`` in steps
    of 1, 2, 4, ... upwards or downwards, then by halves."""
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
    """A fresh model's first updates at ``rate``, constant behind a linear warm-up."""
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
    """What was tried, a line each warm-up, with the nats to the baseline of what did not learn; ``loss``: held-out or
    training."""
    for warmup, own in found.items():
        rates = sorted(own.each, key=lambda one: one.rate)
        good = [f"{one.rate:.2g}" for one in rates if one.learns]
        bad = [f"{one.rate:.2g} ({one.state}, {one.gap:+.2f})" for one in rates if not one.learns]
        told = f"learn at {', '.join(good)}" if good else f"learn at none of {len(bad)} rates"
        told += f", not at {', '.join(bad)}" if bad else ""
        warm = f"a warm-up of {warmup}" if warmup else "no warm-up"
        yield f"trials of {UPDATES} updates with {warm}, by the {loss} loss: {told}"
