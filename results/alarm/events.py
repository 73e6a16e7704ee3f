"""Scores of rows -> alarms -> what they were: hits, leads, false alarms. One score series a run, one threshold."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class Ratio:
    """A sum over runs divided by another: (runs,) each."""

    of: np.ndarray
    over: np.ndarray
    scale: float = 1.0

    def drawn(self, counts: np.ndarray) -> np.ndarray:
        """(draws,): the ratio where run j is there ``counts[i, j]`` times; NaN where nothing is there."""
        over = counts @ self.over
        return np.divide(self.scale * (counts @ self.of), over, out=np.full(len(over), np.nan), where=over > 0)


@dataclass(frozen=True)
class Median:
    """A median over runs; NaN for those that have no number: (runs,)."""

    values: np.ndarray

    def drawn(self, counts: np.ndarray) -> np.ndarray:
        known = np.flatnonzero(~np.isnan(self.values))
        order = known[np.argsort(self.values[known])]
        values, sums = self.values[order], np.cumsum(counts[:, order], axis=1)
        if not len(order):
            return np.full(len(counts), np.nan)
        most = sums[:, -1:]
        low, high = ((sums > place).argmax(axis=1) for place in ((most - 1) // 2, most // 2))
        return np.where(most[:, 0] > 0, (values[low] + values[high]) / 2, np.nan)


Statistic = Ratio | Median


def value(statistic: Statistic) -> float:
    runs = statistic.of if isinstance(statistic, Ratio) else statistic.values
    return float(statistic.drawn(np.ones((1, len(runs)), dtype=int))[0])


def false_rate(found: Sequence[Outcome]) -> Ratio:
    """False alarms per 1,000 healthy rows."""
    rows = [int(one.run.healthy.sum()) for one in found]
    return Ratio(np.array([one.false for one in found]), np.array(rows), PER)


def recall(found: Sequence[Outcome], lead: int | None = None) -> Ratio:
    """Share of failures that were announced, ``lead`` rows before them or more (None: up to 5 rows after)."""
    led = [one.fails and one.lead is not None and (lead is None or one.lead >= lead) for one in found]
    return Ratio(np.array(led, dtype=float), np.array([float(one.fails) for one in found]))


def median_lead(found: Sequence[Outcome]) -> Median:
    """Of the failures that were announced."""
    return Median(np.array([np.nan if one.lead is None or not one.fails else one.lead for one in found]))


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


def interval(found: Sequence[Outcome], statistic: Statistic, draws: int = 1000) -> tuple[float, float, float]:
    """(value, low, high): 95 % by bootstrap over clusters of subject and seed, whose runs ``statistic`` is of.

    Where nothing was counted, or all of it, no draw differs; the end is then exact: binomial, the clusters being the
    units, and of false alarms Poisson.
    """
    clusters, own = np.unique([one.run.cluster for one in found], return_inverse=True)
    times = np.random.default_rng(0).multinomial(len(clusters), np.full(len(clusters), 1 / len(clusters)), size=draws)
    drawn = statistic.drawn(times[:, own])
    low, high = np.nanquantile(drawn, [0.025, 0.975]) if np.isfinite(drawn).any() else (np.nan, np.nan)
    if isinstance(statistic, Ratio) and low == high:
        low, high = _exact(statistic, len({*own[statistic.over > 0]}))
    return value(statistic), float(low), float(high)


def _exact(ratio: Ratio, clusters: int) -> tuple[float, float]:
    """Of a ratio that is the same in every draw: 0, 1, or what a single cluster says, which has no interval."""
    end = 0.025 ** (1 / clusters)
    if not ratio.of.any():
        return 0.0, 1 - end if ratio.scale == 1 else -ratio.scale * float(np.log(0.025)) / float(ratio.over.sum())
    return (end, 1.0) if (ratio.of == ratio.over).all() else (np.nan, np.nan)
