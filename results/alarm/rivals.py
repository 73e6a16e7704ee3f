"""What is compared: each signal alone, the combination, and the rules of others, as score series of a run.

A score is larger where a failure is nearer; ``own``: the threshold that the rule comes with, None where it has none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from corpus import CorpusRun

from stabilitylab.alarm import names
from stabilitylab.alarm.signal import signal_of

LATER = ("loss.rise", "loss.stall")  # signals that came after the first corpus was made
Group = Literal["combination", "signal", "loss", "gradient", "update", "peer", "control"]
Score = Callable[[CorpusRun], np.ndarray]


@dataclass(frozen=True)
class Rival:
    """A rule. ``group``: what it looks at; those of gradients and updates are what a lead is compared with. ``own``:
    the threshold that it comes with; ``source``: where it is from, "" for ours."""

    name: str
    group: Group
    score: Score
    own: float | None = None
    source: str = ""


def features(run: CorpusRun, signals: tuple[str, ...]) -> np.ndarray:
    """(rows, signals): signals as rules add them up, NaN where a row has none."""
    found = np.full((run.rows, len(signals)), np.nan)
    for place, name in enumerate(signals):
        values = run.columns[name]
        known = ~np.isnan(values)
        found[known, place] = squeezed(name, values[known])
    return found


def squeezed(name: str, values: np.ndarray) -> np.ndarray:
    """:func:`stabilitylab.alarm.rules.compressed` of many numbers."""
    kind = name.rsplit(".", 1)[-1]
    if kind == "z":
        values = np.log1p(np.maximum(values, 0.0))
    elif kind == "level":
        values = np.log(np.maximum(values, 1e-12)) * (-1 if signal_of(name).smallest else 1)
    return np.clip(values, -20.0, 20.0)


def alone(name: str) -> Score:
    """One signal, whose missing rows say nothing."""
    return lambda run: np.nan_to_num(features(run, (name,))[:, 0], nan=-np.inf)


def window_z(column: str, rows: int = 128) -> Score:
    """(x - mean) / sd of the ``rows`` before."""

    def score(run: CorpusRun) -> np.ndarray:
        x = run.columns[column]
        found = np.full(run.rows, -np.inf)
        for row in range(20, run.rows):
            past = x[max(0, row - rows) : row]
            past = past[np.isfinite(past)]
            if len(past) > 2:
                found[row] = _infinite((x[row] - past.mean()) / max(past.std(), 1e-12))
        return found

    return score


def exponential_z(column: str, keep: float = 0.97) -> Score:
    """z against an exponential mean and variance, which take no row beyond z = 2.5 as it stands (ZClip, 2504.02507,
    alpha .97, 25 rows of warm-up)."""

    def score(run: CorpusRun) -> np.ndarray:
        x = run.columns[column]
        found = np.full(run.rows, -np.inf)
        mean, variance = float(np.mean(x[:25])), float(np.var(x[:25]))
        for row in range(25, run.rows):
            spread = math.sqrt(variance) + 1e-6
            z = (x[row] - mean) / spread
            found[row] = _infinite(z)
            taken = mean + 2.5 * spread if not z <= 2.5 else x[row]  # as its clipping leaves the norm
            variance = keep * variance + (1 - keep) * (taken - mean) ** 2
            mean = keep * mean + (1 - keep) * taken
        return found

    return score


def over_mean(column: str, keep: float = 0.99) -> Score:
    """x over its exponential mean."""

    def score(run: CorpusRun) -> np.ndarray:
        x = run.columns[column]
        found, mean = np.full(run.rows, -np.inf), x[0]
        for row in range(1, run.rows):
            if row >= 20:
                found[row] = _infinite(x[row] / mean)
            if math.isfinite(x[row]):
                mean = keep * mean + (1 - keep) * x[row]
        return found

    return score


def r_metric(run: CorpusRun) -> np.ndarray:
    """Mean of the z-scores of the loss, the log gradient norm, and their changes, over 128 rows. The published weights
    were not found, so that each weighs the same (R-Metric, EMNLP-Industry 2025.193: its form, not its numbers)."""
    found = np.zeros(run.rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.log(run.columns["gradient"])
    for own in (run.columns["nll"], log):
        for values in (own, np.abs(np.diff(own, prepend=own[:1]))):
            made = CorpusRun(run.name, run.subject, "", "", 0, run.rows, None, None, (), False, {"x": values})
            found = found + window_z("x")(made)
    return found / 4


def trainscope(run: CorpusRun) -> np.ndarray:
    """Trainscope's ChangePointDetector on the loss: |its score| where it fires."""
    try:
        from trainscope.core.detectors.changepoint import ChangePointDetector  # pyright: ignore
    except ImportError:
        return np.full(run.rows, np.nan)
    detector: Any = ChangePointDetector()
    found = [detector.update(float(value)) for value in np.nan_to_num(run.columns["nll"], nan=1e6, posinf=1e6)]
    return np.array([-np.inf if own is None else abs(own) for own in found])


def lightning(run: CorpusRun) -> np.ndarray:
    """Lightning's SpikeDetection (window 10, rtol 2, from the 20th batch on): |loss - running mean| over the mean,
    where the loss rose; a spike enters neither mean nor last value. Written out, since its metric takes half a
    millisecond a row; a test holds it against the class."""
    found = np.full(run.rows, -np.inf)
    past: deque[float] = deque(maxlen=10)
    last = 0.0
    for row, value in enumerate(run.columns["nll"]):
        if row >= 20:
            mean = float(np.mean(past)) if past else math.nan
            if not math.isfinite(value):
                found[row] = np.inf
            elif value > last:
                found[row] = abs(value - mean) / abs(mean)
        if math.isfinite(value) and not found[row] >= 2.0:
            past.append(float(value))
            last = float(value)
    return found


def vigil(run: CorpusRun) -> np.ndarray:
    """Arc Vigil's: curvature's z, or the smaller of weights' and gradients', in two rows one after the other."""
    moved, gradient, curved = (run.columns[f"vigil_{name}"] for name in ("moved", "gradient", "curved"))
    both = np.maximum(curved, np.minimum(moved, gradient))
    return np.where(np.arange(run.rows) > 60, np.minimum(both, np.roll(both, 1)), -np.inf)


def chance(run: CorpusRun) -> np.ndarray:
    """Nothing: a random number a row, by the run's name."""
    return np.random.default_rng([*run.name.encode()]).random(run.rows)


def _infinite(value: float) -> float:
    """What is not a number is as bad as can be."""
    return float(value) if not math.isnan(value) else math.inf


def _group(signal: str) -> Group:
    base = signal.split(".")[0]
    if base == "loss":
        return "loss"
    if base in ("gradient", "grad_norm", "embedding_gradient", "activation_gradient"):
        return "gradient"
    return "update" if base in ("update", "update_rms") else "signal"


def rivals(signals: Sequence[str] | None = None) -> Mapping[str, Rival]:
    """All rules but the combination, by name; ``signals``: those that the corpus has, by default the first corpus."""
    chosen = [name for name in names() if name not in LATER] if signals is None else signals
    found = [Rival(name, _group(name), alone(name)) for name in chosen]
    found += [
        Rival("loss: mean + 6 sd", "loss", window_z("nll"), 6.0),
        Rival("gradient: mean + 6 sd", "gradient", window_z("gradient"), 6.0),
        Rival("ZClip", "gradient", exponential_z("gradient"), 2.5, "2504.02507"),
        Rival("3 x mean loss", "loss", over_mean("nll"), 3.0),
        Rival("R-Metric's form", "loss", r_metric, None, "EMNLP-Industry 2025.193"),
        Rival("RMS_t > 2.3", "signal", alone("rms_t.level"), math.log(2.3), "2304.13013"),
        Rival("Trainscope", "peer", trainscope, 6.0, "trainscope 1.8.1"),
        Rival("StabilityGuard", "peer", lambda run: run.columns["guard"], 10.0, "stabilityguard 0.3.0"),
        Rival("Arc Vigil", "peer", vigil, 2.5, "arc-vigil 1.0.0"),
        Rival("Lightning SpikeDetection", "peer", lightning, 2.0, "lightning 2.6"),
        Rival("learning rate", "control", lambda run: np.log(np.maximum(run.columns["lr"], 1e-30))),
        Rival("learning rate over its past", "control", over_mean("lr", 0.98)),
        Rival("chance", "control", chance),
    ]
    return {rival.name: rival for rival in found}
