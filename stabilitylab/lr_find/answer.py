"""The reading of a search: the best rate, the largest safe rate and the least warm-up, each with an interval, and the
trend of the safe rate over rungs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from .halving import SearchRecord, warmup_rung
from .pairs import excess, half_width, pooled_deviation, t_quantile
from .result import Bracket, RateAnswer, SafeTrend
from .search import PLANNED, STEP, RateTrial, least

TREND_RUNGS = 3  # least rungs behind a trend


def answer(record: SearchRecord, **facts: Any) -> RateAnswer:
    """Read the answer from the trials of a search; ``facts`` are further fields of the answer."""
    updates = record.updates
    losses = {rung: record.losses(rung) for rung in record.rungs}
    common = {
        "delta": record.delta(updates) if updates else math.nan,
        "updates": updates,
        "horizon": record.plan.horizon,
        "losses": losses,
        "failures": failures(record),
        "notes": tuple(record.notes),
        "start": record.start,
        "planned_warmup": record.plan.warmup,
        "stopped": record.stopped,
        **facts,
    }
    nothing = {"best": None, "safe": None, "warmup": None, "seeds": 1, "safe_by_rung": {}, "trend": None}
    if not updates:
        return RateAnswer("too early", **nothing, **common)
    if not any(map(math.isfinite, losses[updates].values())):
        return RateAnswer("fails at every rate", **nothing, **common)
    if record.is_constant:
        return RateAnswer("constant", **nothing, **common)
    best = record.best if record.best is not None else _lowest(record, updates)
    by_rung = {rung: safe for rung in sorted(record.rungs) if (safe := safe_at(record, rung)) is not None}
    safe = record.safe if record.safe is not None else max(by_rung.get(updates, best), best)
    return RateAnswer(
        "found",
        best=best_bounds(record, best, updates),
        safe=safe_bounds(record, best, safe, updates),
        warmup=warmup_bounds(record),
        seeds=len(record.plan.seeds) if record.safe is not None else 1,
        safe_by_rung=by_rung,
        trend=safe_trend(by_rung, record.plan.horizon),
        **common,
    )


def failures(record: SearchRecord) -> dict[float, str]:
    """Return the reason of the first failure at each rate at which a trial with the planned warm-up failed."""
    found: dict[float, str] = {}
    for trial, one in sorted(record.results.items(), key=lambda item: (item[0].rate, item[0].updates, item[0].seed)):
        if one.failed and trial.warmup == PLANNED:
            found.setdefault(trial.rate, one.failed)
    return found


def _lowest(record: SearchRecord, updates: int) -> float:
    """Return the rate of the lowest loss after a rung, of the eligible ones if there are any."""
    losses = record.losses(updates)
    fit = {rate: loss for rate, loss in losses.items() if record.result(rate, updates).eligible}  # at the horizon
    return least(fit or losses)


def best_bounds(record: SearchRecord, best: float, updates: int) -> Bracket:
    """Return the best rate with the range of rates that may be the best.

    A rate may be the best if its loss exceeds the best one's by no more than the paired interval over batches, or than
    the interval of the spread of seeds, and so do all rates between. The true best may lie half a step of the grid
    beyond. An end is open if nothing was run beyond it.
    """
    results = {rate: record.result(rate, updates) for rate in record.rungs[updates]}
    spread = seed_half_width(record, updates)

    def is_tied(rate: float) -> bool:
        one = results.get(rate)
        if one is None or one.failed or not one.eligible:
            return False
        over = excess(one, results[best])
        return over.mean <= max(over.half if math.isfinite(over.half) else 0.0, spread)

    tried = sorted({trial.rate for trial in record.results})
    at = tried.index(best)
    below = list(takewhile(is_tied, reversed(tried[:at])))
    above = list(takewhile(is_tied, tried[at + 1 :]))
    low = None if len(below) == at else min([best, *below]) / math.sqrt(STEP)
    high = None if at + 1 + len(above) == len(tried) else max([best, *above]) * math.sqrt(STEP)
    return Bracket(best, low, high)


def seed_half_width(record: SearchRecord, updates: int) -> float:
    """Return half the width of the interval of a difference between two single runs, by the spread of losses over seeds
    at the same rate; 0 if no rate ran with two seeds."""
    groups: dict[float, list[float]] = {}
    for trial, one in record.results.items():
        if trial.updates == updates and trial.warmup == PLANNED and not one.failed:
            groups.setdefault(trial.rate, []).append(one.loss)
    deviation, freedom = pooled_deviation(list(groups.values()))
    return math.sqrt(2) * deviation * t_quantile(freedom) if freedom else 0.0


def safe_at(record: SearchRecord, updates: int) -> float | None:
    """Return the largest safe rate after a rung by the seed that searches: from the best rate upwards, without a gap,
    trials that did not fail and whose loss is within delta; None if all failed."""
    losses = record.losses(updates)
    if not any(map(math.isfinite, losses.values())):
        return None
    safe, delta = least(losses), record.delta(updates)
    lowest = losses[safe]
    for rate in sorted(rate for rate in losses if rate > safe):
        if not losses[rate] - lowest <= delta:
            break
        safe = rate
    return safe


def safe_bounds(record: SearchRecord, best: float, safe: float, updates: int) -> Bracket:
    """Return the largest safe rate, from the largest rate that is certainly within delta of the best to the lowest that
    is certainly not, or that failed with any seed; open if none is."""
    delta, over = record.delta(updates), record.result(best, updates)
    certain = best
    for rate in sorted(rate for rate in record.rungs[updates] if best < rate <= safe):
        if not excess(record.result(rate, updates), over).high <= delta:
            break
        certain = rate
    return Bracket(safe, certain, _unsafe_above(record, best, safe, updates))


def _unsafe_above(record: SearchRecord, best: float, safe: float, updates: int) -> float | None:
    """Return the lowest rate above the safe one that failed at any rung with any seed, or that is certainly not within
    delta by the last rung that it reached."""
    for rate in sorted({trial.rate for trial in record.results if trial.rate > safe and trial.warmup == PLANNED}):
        own = {trial: one for trial, one in record.results.items() if trial.rate == rate and trial.warmup == PLANNED}
        if any(one.failed or not one.eligible for one in own.values()):
            return rate
        last = max(trial.updates for trial in own)
        seed = record.plan.seeds[0]
        pair = RateTrial(rate, seed, last), RateTrial(best, seed, last)
        if all(trial in record.results for trial in pair):
            over = excess(record.results[pair[0]], record.results[pair[1]])
            if over.low > record.delta(last):
                return rate
    return None


def warmup_bounds(record: SearchRecord) -> Bracket | None:
    """Return the least warm-up that does not lower the largest safe rate, above the largest that does; None if it was
    not tried."""
    if record.safe is None or not record.warmups or record.plan.warmup is None:
        return None
    updates = warmup_rung(record.plan)
    planned, seed = record.result(record.safe, updates), record.plan.seeds[0]
    below = 0.0
    for warmup in record.warmups:
        one = record.results[RateTrial(record.safe, seed, updates, warmup)]
        if excess(one, planned).mean <= record.delta(updates):
            return Bracket(warmup, below, warmup)
        below = float(warmup)
    untried = record.stopped and len(record.warmups) < len(record.plan.tried_warmups)
    return None if untried else Bracket(record.plan.warmup, below, record.plan.warmup)


def safe_trend(by_rung: Mapping[int, float], horizon: int) -> SafeTrend | None:
    """Fit a line through the logarithms of updates and safe rates; None with fewer than three rungs.

    Each safe rate is known to a step of the grid only: the interval is that of the residuals, and never narrower than
    what an error of a quarter of a step (a factor of 2^(1/4)) of each rate gives.
    """
    if len(by_rung) < TREND_RUNGS:
        return None
    x, y = (np.log(np.array(list(values), dtype=float)) for values in (by_rung.keys(), by_rung.values()))
    centre, count = x.mean(), len(x)
    spread = float(((x - centre) ** 2).sum())
    slope = float((x - centre) @ y / spread)
    residuals = y - y.mean() - slope * (x - centre)
    error = max(math.sqrt(float(residuals @ residuals) / (count - 2)), math.log(STEP) / 4)
    half = half_width_of_line(error, count, 1 / math.sqrt(spread))
    at = math.log(horizon) - centre
    middle = float(y.mean()) + slope * at
    width = half_width_of_line(error, count, math.sqrt(1 / count + at**2 / spread))
    ends = [math.exp(middle + sign * width) for sign in (0, -1, 1)]
    return SafeTrend(slope, slope - half, slope + half, count, Bracket(*ends))


def half_width_of_line(error: float, count: int, leverage: float) -> float:
    """Return half the width of the interval of a number of a line through ``count`` points."""
    return half_width(error * leverage, count - 1)
