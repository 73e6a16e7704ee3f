"""What is compared on the second corpus, and thresholds by run: the combination, each signal alone, and controls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from combine import PENALTIES, Fit, fit
from corpus import FIRST, HORIZON
from rivals import Rival, Score, over_mean, rivals
from second_corpus import SecondRun

from stabilitylab.alarm import names
from stabilitylab.alarm.signal import signal_of

CONTROLS = ("rate", "rate over edge")
COMBINATION = "combination"
PEERS = ("StabilityGuard", "Arc Vigil", "Trainscope", "learning rate", "RMS_t > 2.3")  # not recorded here, or a control
ALPHAS = (0.03, 0.2)  # shares of healthy runs with an alarm: the default and the loud rule
UNION = "0.03 union"  # the default, counted together with the warnings of diagnose


def admitted() -> tuple[str, ...]:
    """Return the signals that the combination may use: all that the package has but levels, which have a scale of
    their own (the corpus does not record curvature, so headroom and to_edge are absent anyway)."""
    return tuple(name for name in names() if not name.endswith(".level"))


def known(combination: Fit) -> dict[str, Rival]:
    """Return all rules by name: the combination, the controls, each admitted signal, and the rules of others."""
    found = {
        COMBINATION: Rival(COMBINATION, "combination", combination.score()),
        "rate": Rival("rate", "control", lambda run: np.log(np.maximum(run.columns["lr"], 1e-30))),
        "rate over edge": Rival("rate over edge", "control", _over_edge),
        "rate over its past": Rival("rate over its past", "control", over_mean("lr", 0.98)),
    }
    others = {name: own for name, own in rivals(admitted()).items() if name not in PEERS}
    others.pop("learning rate over its past")
    return {**found, **others}


def _over_edge(run: SecondRun) -> np.ndarray:  # pyright: ignore
    return np.log(np.maximum(run.columns["lr"] / run.edge, 1e-30))


def scores(run: SecondRun, score: Score) -> np.ndarray:
    """Return the score of each row (rows,), -inf before row 20 and where it has none."""
    found = np.nan_to_num(np.asarray(score(run), dtype=float), nan=-np.inf, posinf=np.inf)[: run.rows]
    found[:FIRST] = -np.inf
    return found


def largest(run: SecondRun, score: Score) -> float:
    """Return the largest score of a run."""
    return float(scores(run, score).max(initial=-np.inf))


def by_run(maxima: Sequence[float], alpha: float, accused: Sequence[bool] | None = None) -> float:
    """Return the lowest threshold above which at most a share ``alpha`` of the runs has its largest score. ``accused``:
    runs that are counted as accused whatever their score; inf if they alone are more than alpha."""
    values = np.asarray(maxima, dtype=float)
    own = np.zeros(len(values), bool) if accused is None else np.asarray(accused, bool)
    allowed = math.floor(alpha * len(values) + 1e-9) - int(own.sum())
    if allowed < 0 or not len(values):
        return math.inf
    free = np.sort(values[~own])[::-1]
    return float(free[allowed]) if allowed < len(free) else -math.inf


def thresholds(maxima: Sequence[float], accused: Sequence[bool]) -> dict[str, float]:
    """Return the thresholds of a rule by the largest scores of healthy runs and what diagnose says of these."""
    return {**{f"{alpha:g}": by_run(maxima, alpha) for alpha in ALPHAS}, UNION: by_run(maxima, ALPHAS[0], accused)}


def well(runs: Sequence[SecondRun]) -> list[SecondRun]:
    """Return the healthy runs."""
    return [run for run in runs if run.outcome == "healthy"]


def cross_fitted(runs: Sequence[SecondRun], penalty: float) -> dict[str, Fit]:
    """Return the combination by architecture, each fitted without the runs of this architecture."""
    return {
        arch: fit([run for run in runs if run.arch != arch], penalty, admitted(), signed=True)
        for arch in sorted({run.arch for run in runs})
    }


def announced(run: SecondRun, score: np.ndarray, threshold: float) -> int | None:
    """Return by how many rows the first alarm comes before the event is full-blown, of alarms in the 200 rows before
    it; None without one. An alarm is a score above the threshold."""
    if run.failed is None:
        return None
    rows = np.flatnonzero(score[: run.failed] > threshold)
    rows = rows[rows >= run.failed - HORIZON]
    return run.failed - int(rows[0]) if len(rows) else None


def choose_penalty(runs: Sequence[SecondRun]) -> float:
    """Return the penalty with the largest share of events announced at the loud threshold, each architecture by the
    fits of the others; the largest of equals."""
    best, chosen = -1.0, PENALTIES[-1]
    for penalty in reversed(PENALTIES):
        fits = cross_fitted(runs, penalty)
        limit = by_run([largest(run, fits[run.arch].score()) for run in well(runs)], ALPHAS[-1])
        events = [run for run in runs if run.outcome == "failure"]
        hits = [announced(run, scores(run, fits[run.arch].score()), limit) is not None for run in events]
        if (share := float(np.mean(hits)) if hits else 0.0) > best:
            best, chosen = share, penalty
    return chosen


def latched(score: np.ndarray, threshold: float, rest: int = 50) -> list[int]:
    """Return the rows of alarms, one an episode: after an alarm the rule is silent until its score has not been above
    the threshold for 50 rows."""
    found, last = list[int](), -math.inf
    for row in np.flatnonzero(score > threshold):
        if row - last > rest:
            found.append(int(row))
        last = row
    return found


def tables_of(signals: Mapping[str, float]) -> set[str]:
    """Return the tables that a combination reads."""
    return {signal_of(name).table for name in signals} - {""}
