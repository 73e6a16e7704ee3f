"""Scores of rows -> alarms -> what they were: hits, leads, false alarms. One score series a run, one threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from corpus import AFTER, FIRST, HORIZON, CorpusRun

from stabilitylab.alarm.alarm import REFRACTORY

Scores = Sequence[np.ndarray]
PER = 1000.0


def alarms(score: np.ndarray, threshold: float, quiet: int = REFRACTORY) -> list[int]:
    """Rows at which a rule speaks: the score reaches the threshold, and it has said nothing for ``quiet`` rows."""
    found: list[int] = []
    for row in np.flatnonzero(score >= threshold):
        if not found or row - found[-1] >= quiet:
            found.append(int(row))
    return found


@dataclass(frozen=True)
class Outcome:
    """What a rule's alarms on one run were. ``lead``: t* minus the first alarm that hits, None for none; ``before``:
    alarms before the horizon; ``delay``: rows from a fault to the first alarm within 50 of it."""

    run: CorpusRun
    false: int = 0
    benign: int = 0
    before: int = 0
    lead: int | None = None
    delay: int | None = None

    @property
    def fails(self) -> bool:
        return self.run.outcome == "failure"


def outcome(run: CorpusRun, score: np.ndarray, threshold: float) -> Outcome:
    """What the alarms of one run were, by the protocol."""
    rows = [FIRST + row for row in alarms(score[FIRST : run.rows], threshold)]
    healthy = run.healthy
    false = sum(bool(healthy[row]) for row in rows)
    if run.failed is not None and run.outcome == "failure":
        hits = [row for row in rows if run.failed - HORIZON <= row <= run.failed + AFTER]
        before = sum(row < run.failed - HORIZON for row in rows)
        return Outcome(run, before=before, lead=run.failed - hits[0] if hits else None)
    if run.fault is not None:
        after = [row - run.fault for row in rows if 0 <= row - run.fault < REFRACTORY]
        return Outcome(run, false=false, delay=after[0] if after else None)
    return Outcome(run, false=false, benign=sum(not healthy[row] for row in rows))


def outcomes(runs: Sequence[CorpusRun], scores: Scores, threshold: float) -> list[Outcome]:
    return [outcome(run, score, threshold) for run, score in zip(runs, scores, strict=True)]


def healthy_rows(runs: Sequence[CorpusRun]) -> int:
    return sum(int(run.healthy.sum()) for run in runs)


def false_rate(found: Sequence[Outcome]) -> float:
    """False alarms per 1,000 healthy rows; NaN without one."""
    rows = healthy_rows([one.run for one in found])
    return PER * sum(one.false for one in found) / rows if rows else float("nan")


def recall(found: Sequence[Outcome], lead: int | None = None) -> float:
    """Share of failures that were announced, ``lead`` rows before them or more (None: up to 5 rows after)."""
    leads = [one.lead for one in found if one.fails]
    if not leads:
        return float("nan")
    return sum(own is not None and (lead is None or own >= lead) for own in leads) / len(leads)


def median_lead(found: Sequence[Outcome]) -> float:
    """Of the failures that were announced; NaN without one."""
    leads = [one.lead for one in found if one.fails and one.lead is not None]
    return float(np.median(leads)) if leads else float("nan")


def threshold_at(runs: Sequence[CorpusRun], scores: Scores, rate: float) -> float:
    """The lowest threshold with at most ``rate`` false alarms per 1,000 healthy rows, by bisection over the scores of
    healthy rows; above all of them where no other has so few."""
    healthy = [score[: run.rows][run.healthy] for run, score in zip(runs, scores, strict=True)]
    values = np.concatenate([*healthy, np.empty(0)])
    values = np.unique(values[np.isfinite(values)])
    well = [(run, score) for run, score in zip(runs, scores, strict=True) if run.healthy.any()]
    allowed = rate * healthy_rows(runs) / PER
    low, high = 0, len(values)  # from ``high`` on alarms are few enough
    while low < high:
        middle = (low + high) // 2
        few = sum(outcome(run, score, values[middle]).false for run, score in well) <= allowed
        low, high = (low, middle) if few else (middle + 1, high)
    if high < len(values):
        return float(values[high])
    return float(np.nextafter(values[-1], np.inf)) if len(values) else float("inf")


def interval(
    found: Sequence[Outcome], statistic: Callable[[Sequence[Outcome]], float], draws: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high): 95 % by bootstrap over clusters of subject and seed."""
    clusters: dict[str, list[Outcome]] = {}
    for one in found:
        clusters.setdefault(one.run.cluster, []).append(one)
    groups, random = list(clusters.values()), np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        chosen = random.integers(len(groups), size=len(groups))
        drawn.append(statistic([one for place in chosen for one in groups[place]]))
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if np.isfinite(drawn).any() else (np.nan, np.nan)
    return statistic(found), float(low), float(high)
